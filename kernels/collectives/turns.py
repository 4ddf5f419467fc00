"""Collectives over arenas that every rank can read, in turns: see rlk.kernels.collectives.arena for the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlk.kernels.collectives.arena import HEADER_BYTES, Layout
from rlk.kernels.collectives.base import SummingCollective
from rlk.kernels.cuda import launch
from rlk.kernels.cuda.programs import exchange

BLOCK = 4096
TWO_STEPS = 1 << 20
"""Bytes from which an all-reduce is a reduce-scatter and a gather: the same sums, 2 / size of the traffic."""

Read = Callable[[int, int], None]


class ArenaCollective(SummingCollective):
    """One rank of a group whose arenas are mapped here.

    arena: uint8, this rank's own, its header zero. addresses: every rank's arena as this process sees it. wait: lets
    what is started from then on run after every slot of the own header has become at least 1.
    """

    def __init__(
        self, name: str, rank: int, layout: Layout, arena: torch.Tensor, addresses: Sequence[int],
        wait: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name, self.rank, self.size, self.layout, self.device = name, rank, layout.size, layout, arena.device
        self._header, self._data = arena[:HEADER_BYTES].view(torch.int32), arena[HEADER_BYTES:]
        self._arenas = torch.tensor([a + HEADER_BYTES for a in addresses], device=arena.device)
        self._slots = torch.tensor([a + 4 * layout.slot(rank) for a in addresses], device=arena.device)
        self._wait, self._stages = wait, dict[str, int]()

    def stage(self, number: int) -> str:
        """The stage whose number a header holds."""
        return list(self._stages)[number]

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = t.new_empty(self.size, *t.shape)
        self._moved(t.contiguous().view(1, -1), out.view(self.size, -1), 0, stage)
        return out

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = t.new_empty(t.shape)
        self._moved(t.contiguous().view(self.size, -1), out.view(self.size, -1), self.rank, stage)
        return out

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        return self.all_gather(t, stage).sum(0)

    def gather_tree(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See SummingCollective."""
        n = t.numel()
        if 4 * n >= TWO_STEPS and self.size > 2 and n % self.size == 0:
            piece = self.exchange_tree(t.reshape(self.size, -1), stage)
            return self.all_gather(piece, stage).view(t.shape)
        out = t.new_empty(t.shape)
        self._summed(t.contiguous().view(1, -1), out.view(-1), 0, stage)
        return out

    def exchange_tree(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See SummingCollective."""
        out = t.new_empty(t.shape[1:])
        self._summed(t.contiguous().view(self.size, -1), out.view(-1), self.rank, stage)
        return out

    def _moved(self, t: torch.Tensor, out: torch.Tensor, block: int, stage: str) -> None:
        """out[p] = piece `block` of rank p's t [pieces, n]."""
        fours = t.shape[1] * t.element_size() % 4 == 0 and t.data_ptr() % 4 == 0
        t, out = (x.view(torch.uint8).view(torch.int32 if fours else torch.uint8) for x in (t, out))
        each, half = self._words(t)

        def read(offset: int, length: int) -> None:
            launch.run(
                exchange.collect, (launch.tiles(length, BLOCK), self.size), self._header, self._arenas, out, self.rank,
                t.shape[1], offset, length, block * each, half, SIZE=self.size, BLOCK=BLOCK,
            )  # fmt: skip

        self._turns(t, read, stage)

    def _summed(self, t: torch.Tensor, out: torch.Tensor, block: int, stage: str) -> None:
        """out = the tree over piece `block` of every rank's t fp32 [pieces, n]."""
        if t.dtype != torch.float32:
            raise TypeError(f"{self.name}: {stage} sums {t.dtype}, a tree is over torch.float32")
        each, half = self._words(t)

        def read(offset: int, length: int) -> None:
            launch.run(
                exchange.collect_tree, (launch.tiles(length, BLOCK), 1), self._header, self._arenas, out, self.rank,
                offset, length, block * each, half, SIZE=self.size, BLOCK=BLOCK,
            )  # fmt: skip

        self._turns(t.view(torch.int32), read, stage)

    def _words(self, t: torch.Tensor) -> tuple[int, int]:
        """Of a piece's part in a turn, and of a half: in words of t [pieces, n]."""
        return self.layout.chunk(t.shape[0]) // t.element_size(), self.layout.half // t.element_size()

    def _turns(self, t: torch.Tensor, read: Read, stage: str) -> None:
        """Puts t [pieces, n] in as many turns as it takes; `read` is called with each one's offset and length in words."""
        if t.device != self.device:
            raise TypeError(f"{self.name}: {stage} moves tensors of {self.device}, got one on {t.device}")
        (pieces, n), word, number = t.shape, t.element_size(), self._stages.setdefault(stage, len(self._stages))
        each, half = self._words(t)
        for offset, length in self.layout.chunks(n * word, pieces):
            at, words = offset // word, length // word
            launch.run(
                exchange.put, (launch.tiles(words, BLOCK), pieces), t, self._data.view(t.dtype), self._header, n, at,
                words, each, half, BLOCK=BLOCK,
            )  # fmt: skip
            launch.run(exchange.signal, (1,), self._header, self._slots, number, self.rank, SIZE=self.size, warps=1)
            self._wait()
            read(at, words)
