"""The plan as evidence: read from plan.json, derived again, and summed up for the manifest."""

from __future__ import annotations

from rlk.evidence.errors import EvidenceError
from rlk.evidence.layout import PLAN, roles
from rlk.evidence.schemas import Derived, TopologyRecord
from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors


def read_plan(text: str) -> Plan:
    """The plan in a text that `Plan.to_json` wrote. Raises EvidenceError."""
    try:
        return Plan.from_json(text)
    except ConfigErrors as error:
        raise EvidenceError(f"{PLAN}: {error.errors[0]}") from error


def derived_again(plan: Plan) -> Plan:
    """What the same config, profile and shape give now. Raises EvidenceError where they give no plan."""
    try:
        return derive(plan.config, plan.profile, plan.shape)
    except ConfigErrors as error:
        raise EvidenceError(f"{PLAN}: its config is refused: {error.errors[0]}") from error


def topology_record(plan: Plan) -> TopologyRecord:
    """Topology and counts, as the manifest states them."""
    return TopologyRecord(
        train_tp=plan.train.tp,
        train_cp=plan.train.cp,
        rollout_tp=plan.rollout.tp,
        rollout_cp=plan.rollout.cp,
        ranks=plan.ranks,
        engines=plan.engines,
        engine_ranks=plan.engine_ranks,
        engine_cap=plan.engine_cap,
    )


def derived_record(plan: Plan) -> Derived:
    """The other derived values, as the manifest states them."""
    return Derived(
        token_budget=plan.token_budget,
        logical_budget=plan.logical_budget,
        graph_sizes=plan.graph_sizes,
        padded_vocab=plan.padded_vocab,
        prompts_per_step=plan.prompts_per_step,
        samples_per_prompt=plan.samples_per_prompt,
        baseline=plan.baseline,
        offload=plan.offload,
        max_model_len=plan.max_model_len,
    )


def probed_roles(plan: Plan) -> tuple[str, ...]:
    """The ranks that record what they compute: all, or none."""
    return roles(plan.ranks, plan.engines, plan.engine_ranks) if plan.config.probe else ()
