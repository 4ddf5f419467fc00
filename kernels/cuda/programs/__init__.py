"""The Triton programs themselves. Upper-case parameters are compile-time constants; lower-case ones are tensors,
strides and sizes.

Row counts are never specialized on: a program that was compiled anew for one row could sum in another order.
"""
