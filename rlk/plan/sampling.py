"""How one sample is drawn: temperature, nucleus and top-k, and the lists that mix several of them in a batch."""

from __future__ import annotations

from dataclasses import dataclass

from rlk.plan.domains import Real, Whole, check_keys
from rlk.plan.errors import shown

# float32 because both engines divide the logits by the float32 of the temperature: one that rounds to zero would divide
# by zero, so it is refused here and never clamped.
TEMPERATURE = Real("finite and >= 0 (0 is greedy), within what float32 can hold", low=0.0, float32=True)
TOP_P = Real("(0, 1]; 1 disables it", low=0.0, high=1.0, open_low=True)
TOP_K = Whole("-1 (off) or 1 to the size of the real vocabulary", low=1, also=(-1,))


@dataclass(frozen=True)
class Sampling:
    """One setting of the sampler. top_p is the float64 that was asked for; top_k -1 is off."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", TEMPERATURE.parse(self.temperature))
        object.__setattr__(self, "top_p", TOP_P.parse(self.top_p))
        object.__setattr__(self, "top_k", TOP_K.parse(self.top_k))

    @property
    def greedy(self) -> bool:
        """Whether the lowest id among the maxima is taken; top_p and top_k are then ignored by both engines."""
        return self.temperature == 0.0

    @property
    def text(self) -> str:
        """`T/p/k`, as `--mix` takes it."""
        return "/".join(shown(number) for number in (self.temperature, self.top_p, self.top_k))

    @property
    def slug(self) -> str:
        """The part of a cell id that names this setting, such as `t0.7-p0.95-koff`."""
        if self.greedy:
            return "greedy"
        nucleus = "poff" if self.top_p == 1.0 else f"p{shown(self.top_p)}"
        return f"t{shown(self.temperature)}-{nucleus}-{'koff' if self.top_k == -1 else f'k{self.top_k}'}"


@dataclass(frozen=True)
class MixDomain:
    """Non-empty lists of samplings, said as `T/p/k,T/p/k,...` or as a list of triples or mappings."""

    allowed: str = f"T/p/k,T/p/k,... with T {TEMPERATURE.allowed}; p {TOP_P.allowed}; k {TOP_K.allowed}"

    def parse(self, value: object) -> tuple[Sampling, ...]:
        """The samplings in the order said; p and k may be left out of a triple."""
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not items:
            raise ValueError(f"{shown(value)}: allowed is {self.allowed}")
        return tuple(self._one(item) for item in items)

    def text(self, value: object) -> str:
        """The form that `--mix` takes."""
        return ",".join(sampling.text for sampling in self.parse(value))

    def _one(self, item: object) -> Sampling:
        if isinstance(item, Sampling):
            return item
        if isinstance(item, dict):
            keys = check_keys(item, ("temperature", "top_p", "top_k"))
            item = (keys.get("temperature", 1.0), keys.get("top_p", 1.0), keys.get("top_k", -1))
        if isinstance(item, list | tuple):
            parts: list[object] = list(item)
        else:
            parts = [*item.split("/")] if isinstance(item, str) else [item]
        if not 1 <= len(parts) <= 3:
            raise ValueError(f"{shown(item)}: allowed is {self.allowed}")
        parts += (1.0, -1)[len(parts) - 1 :]
        return Sampling(TEMPERATURE.parse(parts[0]), TOP_P.parse(parts[1]), TOP_K.parse(parts[2]))
