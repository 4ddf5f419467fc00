"""Collectives over arenas that every rank can read, in turns: see rlk.kernels.collectives.arena for the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlk.kernels.collectives.arena import HEADER_BYTES, Layout
from rlk.kernels.collectives.base import SummingCollective
from rlk.kernels.cuda import launch
from rlk.kernels.cuda.programs import exchange

BLOCK, SUM_BLOCK = 4096, 2048
TWO_STEPS = 1 << 20
"""Bytes from which an all-reduce is a reduce-scatter and a gather: the same sums, 2 / size of the traffic."""


class ArenaCollective(SummingCollective):
    """One rank of a group whose arenas are mapped here.

    arena: uint8, this rank's own, its header zero. progress: int32 [3], zero, of the host, where the device can write
    it. addresses: every rank's arena as this process sees it. wait: lets
    what is started from then on run after every slot of the own header has become at least 1.
    """

    def __init__(
        self, name: str, rank: int, layout: Layout, arena: torch.Tensor, progress: torch.Tensor,
        addresses: Sequence[int], wait: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name, self.rank, self.size, self.layout, self.device = name, rank, layout.size, layout, arena.device
        self._header, self._data = arena[:HEADER_BYTES].view(torch.int32), arena[HEADER_BYTES:]
        self._arenas = torch.tensor([a + HEADER_BYTES for a in addresses], device=arena.device)
        self._slots = torch.tensor([a + 4 * layout.slot(rank) for a in addresses], device=arena.device)
        self.progress, self._host = progress, progress.data_ptr()
        self._wait, self._stages = wait, dict[str, int]()

    def stage(self, number: int) -> str:
        """The stage whose number a rank's progress holds."""
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

        def read(sizes: _Sizes, offset: int, length: int) -> None:
            launch.run(
                exchange.collect, (launch.tiles(length, BLOCK), self.size), self._header, self._host, self._arenas, out,
                self.rank, self.size, *sizes.said(sizes.piece, offset, length, block * sizes.each, sizes.half),
                WIDE=sizes.wide, BLOCK=BLOCK,
            )  # fmt: skip

        self._turns(t, read, stage)

    def _summed(self, t: torch.Tensor, out: torch.Tensor, block: int, stage: str) -> None:
        """out = the tree over piece `block` of every rank's t fp32 [pieces, n]."""
        if t.dtype != torch.float32:
            raise TypeError(f"{self.name}: {stage} sums {t.dtype}, a tree is over torch.float32")

        def read(sizes: _Sizes, offset: int, length: int) -> None:
            launch.run(
                exchange.collect_tree, (launch.tiles(length, SUM_BLOCK), 1), self._header, self._host, self._arenas,
                out, self.rank, *sizes.said(offset, length, block * sizes.each, sizes.half), SIZE=self.size,
                WIDE=sizes.wide, BLOCK=SUM_BLOCK,
            )  # fmt: skip

        self._turns(t.view(torch.int32), read, stage)

    def _turns(self, t: torch.Tensor, read: _Read, stage: str) -> None:
        """Puts t [pieces, n] in as many turns as it takes; `read` is told the offset and length of each, in words."""
        if t.device != self.device:
            raise TypeError(f"{self.name}: {stage} moves tensors of {self.device}, got one on {t.device}")
        pieces, sizes, number = t.shape[0], _Sizes.of(t, self.layout), self._stages.setdefault(stage, len(self._stages))
        for offset, length in self.layout.chunks(sizes.piece * sizes.word, pieces):
            at, words = offset // sizes.word, length // sizes.word
            launch.run(
                exchange.put, (launch.tiles(words, BLOCK), pieces), t, self._data.view(t.dtype), self._header,
                *sizes.said(sizes.piece, at, words, sizes.each, sizes.half), WIDE=sizes.wide, BLOCK=BLOCK,
            )  # fmt: skip
            launch.run(
                exchange.signal, (1,), self._header, self._slots, self._host, number, self.rank, self.size, warps=1
            )
            self._wait()
            read(sizes, at, words)


@dataclass(frozen=True)
class _Sizes:
    """What programs are told of t [pieces, n] and the arena. Bytes of a word; else in words: of a piece, of its part in
    a turn, and of a half. wide: all are multiples of 16 words, and words have 4 bytes."""

    word: int
    piece: int
    each: int
    half: int
    wide: bool

    @classmethod
    def of(cls, t: torch.Tensor, layout: Layout) -> _Sizes:
        """Of a tensor and the arena that it goes through."""
        (pieces, n), word = t.shape, t.element_size()
        return cls(word, n, layout.chunk(pieces) // word, layout.half // word, word == 4 and n % 16 == 0)

    def said(self, *words: int) -> list[int]:
        """Numbers of words as the programs take them."""
        return [w // 16 for w in words] if self.wide else list(words)


_Read = Callable[[_Sizes, int, int], None]
