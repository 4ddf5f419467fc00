"""The benchmark puts both arms of a case side by side, keeps what only one of them has, and starts each as it must."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.__main__ import environment, joined


def arm(*cases: dict[str, Any]) -> dict[str, Any]:
    return {"cases": list(cases)}


def case(op: str, **measured: Any) -> dict[str, Any]:
    return {"op": op, "size": "M 16", "measured": measured}


def test_speed_and_error_are_those_of_the_ordinary_op() -> None:
    ours = arm(case("product", cublas={"us": 20.0, "rms_error": 2e-3}, triton={"us": 40.0, "rms_error": 1e-3}))
    ordinary = arm(case("other"), case("product", mm={"us": 10.0, "rms_error": 2e-3}))
    (entry,) = joined(ours, ordinary)
    assert entry["speed"] == {"cublas": 0.5, "triton": 0.25}
    assert entry["error_ratio"] == {"cublas": 1.0, "triton": 0.5}


def test_a_case_without_an_ordinary_op_has_no_ratio() -> None:
    (entry,) = joined(arm(case("fingerprint", triton={"us": 5.0})), arm(case("fingerprint")))
    assert entry == {"op": "fingerprint", "size": "M 16", "ours": {"triton": {"us": 5.0}}}


def test_an_arm_that_failed_says_so_in_its_place() -> None:
    failed = {"op": "product", "size": "M 16", "error": "RuntimeError: no such op"}
    (entry,) = joined(arm(case("product", triton={"us": 5.0})), arm(failed))
    assert entry["ordinary"] == "RuntimeError: no such op"
    assert "speed" not in entry
    (entry,) = joined(arm(failed), arm(case("product", mm={"us": 5.0})))
    assert entry["ours"] == "RuntimeError: no such op"
    assert "speed" not in entry


def test_only_our_arm_turns_split_k_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("RLK_GEMM", "triton")
    assert environment("ours")["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    assert not {"CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "RLK_GEMM"} & set(environment("ordinary"))
