"""The start-up proof with the sizes of real models, for each choice of library."""

from __future__ import annotations

from rlk.kernels import product_proof
from rlk.kernels.proof import AttentionShape, prove
from tools.gpu.data import BIG, DEVICE, SMALL, chosen
from tools.gpu.report import Report


def run(report: Report) -> None:
    """Small probes first, then every weight of two models at 38 row counts."""
    for heads, kv_heads, page in ((32, 8, 16), (16, 8, 16), (4, 1, 16), (32, 8, 64)):
        shape = AttentionShape(heads, kv_heads, 128, page)
        proofs = f"prove, {heads}/{kv_heads} heads, page {page}"
        report.check(proofs, lambda s=shape: {p.name: [p.form, p.sentence] for p in prove(DEVICE, (), s)})
    for gemm, tree in (("cublas", "triton"), ("triton", "cublas"), ("cublas-fp32", "triton")):
        for model, tp in ((BIG, 1), (SMALL, 1), (BIG, 8), (BIG, 4)):
            if gemm == "cublas-fp32" and (model, tp) != (BIG, 1):
                continue
            for product in model.products(tp, 4096, backward=gemm != "cublas-fp32"):
                with chosen(RLK_GEMM=gemm, RLK_TREE=tree):
                    name = f"{product.name}, RLK_GEMM={gemm} RLK_TREE={tree}"
                    report.check(name, lambda p=product: product_proof.check([p], DEVICE)[0])
