"""Makes the embedded tiny model and its prompts: ``OMP_NUM_THREADS=1 python -m tools.make_tiny``.

The same seed and steps give the same bytes on the same kind of CPU with the same torch: its matrix products are not
the same bits on every instruction set.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

import click
import torch

from tools import tiny_model, tiny_prompts, tiny_sums, tiny_tokenizer, tiny_train

CORPUS = 2000  # problems of each kind that the tokenizer's merges are learned from


@click.command()
@click.option("--out", default="assets", show_default=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--steps", default=2800, show_default=True, type=click.IntRange(min=1), help="Optimizer steps.")
def main(out: Path, seed: int, steps: int) -> None:
    """Trains the tiny Qwen3 on sums; writes OUT/tiny-qwen3 and OUT/sums.jsonl."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # one thread is one order of summation
    torch.use_deterministic_algorithms(True)
    folder = out / "tiny-qwen3"
    folder.mkdir(parents=True, exist_ok=True)

    rng = random.Random(f"corpus {seed}")
    corpus = [tiny_sums.draw(rng, kind) for kind in tiny_sums.KINDS for _ in range(CORPUS)]
    tokenizer = tiny_tokenizer.build(problem.prompt + problem.answer for problem in corpus)
    tiny_model.check_ids(tokenizer)

    model = tiny_model.new_model(seed)
    tiny_train.train(model, tokenizer, seed, steps)
    tiny_model.round_to_bf16(model)
    tiny_tokenizer.save(tokenizer, folder, model_max_length=model.config.max_position_embeddings)
    tiny_model.save(model, folder)

    try:
        problems = tiny_prompts.choose(model, tokenizer, seed)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    tiny_prompts.write(problems, out / "sums.jsonl")


if __name__ == "__main__":
    main()
