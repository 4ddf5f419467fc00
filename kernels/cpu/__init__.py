"""CPU forms: fixed loop order in C++, called through ctypes."""
