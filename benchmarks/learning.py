"""Learning curves on the stamps: each objective alone and together, and the learning rates behind the default.

A run trains a tiny tower on one core for about a minute and is scored on held-out stamps, of subjects never trained on, at each quarter. Runs
append one JSON line each to `learning.jsonl`; `--report` rewrites the tables of `learning.md` from the newest line of every run.

    python benchmarks/learning.py --shards shards            every run that has no line yet (about an hour of one core), then the report
    python benchmarks/learning.py --shards shards sigmoid-0  one run
    python benchmarks/learning.py --list
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle import (
    AudioShape,
    BatchShape,
    Choices,
    Contrastive,
    ImageShape,
    LateInteraction,
    LateInteractionSide,
    Objective,
    PackedBatch,
    Packer,
    PairLossForm,
    Schedule,
    ShardStream,
    StepItems,
    Trainer,
    TrainerConfig,
)
from treadle.kernels.maxsim import maxsim
from treadle.launch.held_out import HeldOut
from treadle.launch.samples import read_samples
from treadle.launch.settings import HeldOutSettings, SourceSettings
from treadle.model.choices import choice_log_probabilities
from treadle.model.evaluate import Vectors, retrieve
from treadle.model.layout import BatchLayout
from treadle.pipeline import PackedReader, PackedWriter, Schema

HERE = Path(__file__).parent
LINES, REPORT = HERE / "learning.jsonl", HERE / "learning.md"
BEGIN, END = "<!-- {}: made by learning.py -->", "<!-- end of {} -->"

FIELDS = ("png", "en.txt", "fr.txt", "fr.ogg")
SIDES = {name: LateInteractionSide.QUERY if name.endswith("txt") else LateInteractionSide.DOCUMENT for name in FIELDS}
SCHEMA = Schema(fields=FIELDS, sides=SIDES)
LANGUAGES = ("en.txt", "es.txt", "fr.txt", "ru.txt", "el.txt")
LETTERS = b"ESFRG"
"""What a caption's choice offers: its language."""
SHAPE = BatchShape(
    max_rows_per_device=16,
    max_segments_per_device=128,
    max_columns_per_row=128,
    max_choices_per_item=len(LETTERS),
    image=ImageShape(patch_side=24, channels=4),
    audio=AudioShape(chunk_samples=640, sample_rate=16_000),
)
STEPS, SWEEP_STEPS = 300, 100
SEEDS = (0, 1)
TWICE = ("masked", "sigmoid", "joint")
"""Objectives that run with every seed, to show how much seeds alone differ; the others run with the first."""
SWEEP = {(128, "fp32"): (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (512, "bf16"): (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3)}
PAIRS = (
    ("text", "text", 1),
    ("text", "image", 10),
    ("image", "text", 10),
    ("text", "audio", 10),
    ("audio", "text", 10),
    ("image", "audio", 10),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run trains."""

    seed: int = 0
    hidden: int = 128
    precision: str = "fp32"
    steps: int = STEPS
    learning_rate: float = 2e-3
    parts: Mapping[str, object] = field(default_factory=dict)
    """Fields of its `TrainerConfig`."""

    def config(self) -> TrainerConfig:
        base = TrainerConfig(
            depth=2, hidden=self.hidden, batch=SHAPE, schedule=Schedule(steps=self.steps, learning_rate=self.learning_rate),
            seed=self.seed, device="cpu",
        )  # fmt: skip
        return replace(base, precision=self.precision, **self.parts)  # type: ignore[arg-type]  # fields are given by name


def _objectives() -> dict[str, dict[str, object]]:
    contrastive, late = {"objective": Objective.CONTRASTIVE}, {"late_interaction": LateInteraction(weight=1.0, width=64)}
    return {
        "masked": {"objective": Objective.MASKED},
        "sigmoid": contrastive,
        "balanced": contrastive | {"contrastive": Contrastive(pair_loss=PairLossForm.BALANCED)},
        "ranked": contrastive | {"contrastive": Contrastive(pair_loss=PairLossForm.RANKED)},
        "matryoshka": contrastive | {"contrastive": Contrastive(matryoshka_dimensions=(32, 64, 128))},
        "sigmoid+late": contrastive | late,
        "joint": {"objective": Objective.JOINT},
        "masked+late": {"objective": Objective.MASKED} | late,
        "joint+late": {"objective": Objective.JOINT} | late,
        "choices": contrastive | {"choices": Choices(weight=1.0)},
    }


def all_runs() -> dict[str, Run]:
    """By name: every objective with every seed, then the sweeps."""
    objectives = _objectives()
    runs = {f"{name}-{SEEDS[0]}": Run(seed=SEEDS[0], parts=parts) for name, parts in objectives.items()}
    runs |= {f"{name}-{seed}": Run(seed=seed, parts=objectives[name]) for seed in SEEDS[1:] for name in TWICE}
    for (hidden, precision), rates in SWEEP.items():
        for rate in rates:
            runs[f"rate-{hidden}-{rate:g}"] = Run(
                hidden=hidden, precision=precision, steps=SWEEP_STEPS, learning_rate=rate, parts=objectives["sigmoid"]
            )
    return runs


class Data:
    """The stamps: training batches packed once, so that a run's minute is its own; held-out samples."""

    def __init__(self, shards: Path, work: Path) -> None:
        self._train = [str(path) for path in sorted(shards.glob("train-*.tar"))]
        self._held_out = (SourceSettings(urls=(str(shards / "held-out-*.tar"),)),)
        self._work = work

    def batches(self, name: str, run: Run) -> Iterator[PackedBatch]:
        """Training batches without end, from `run.seed`'s order."""
        if name.startswith("choices"):
            return self._choice_batches(run)
        folder = self._work / f"seed-{run.seed}"
        if not (folder / "index.json").exists():
            with (
                ShardStream(self._train, SHAPE, seed=run.seed, schema=SCHEMA, shuffle=600, threads=1) as stream,
                PackedWriter(folder) as out,
            ):
                for _, batch in zip(range(STEPS), stream, strict=False):
                    out.write(batch)
        return iter(PackedReader(folder))

    def held_out(self, config: TrainerConfig) -> HeldOut:
        return HeldOut.read(HeldOutSettings(sources=self._held_out, schema=SCHEMA), config)

    def captions(self, sources: Sequence[SourceSettings]) -> list[StepItems]:
        """Every sample's captions, each asking for its own language."""
        schema = Schema(fields=LANGUAGES)
        steps: list[StepItems] = []
        for sample in read_samples(sources, SHAPE, schema):
            targets = [[float(LANGUAGES.index(name) == k) for k in range(len(LETTERS))] for name in sample.fields]
            count = len(sample.fields)
            items = sample.items
            steps.append(
                StepItems(
                    items.modalities, items.contents, bags=[0] * count, ids=items.ids, groups=items.groups, relations=items.relations,
                    choices=[LETTERS] * count, choice_targets=targets,
                )
            )  # fmt: skip
        return steps

    def _choice_batches(self, run: Run) -> Iterator[PackedBatch]:
        steps = self.captions([SourceSettings(urls=tuple(self._train))])
        rng = np.random.default_rng(run.seed)
        packer = Packer(SHAPE)
        while True:
            for number in rng.permutation(len(steps)):
                packer.add(steps[number])
                while packer.ready():
                    yield packer.take()

    def choice_accuracy(self, trainer: Trainer) -> tuple[float, int]:
        """The share of held-out captions whose likeliest choice is their language, and how many they are."""
        packer = Packer(SHAPE)
        right = total = 0
        for items in self.captions(self._held_out):
            packer.add(items)
        with torch.no_grad():
            for batch in packer.flush():
                layout = BatchLayout.from_batch(batch, "cpu")
                logs_L = choice_log_probabilities(trainer.network.tower(layout), trainer.network.heads.text, layout)
                chosen_C = logs_L.view(-1, len(LETTERS)).argmax(1)
                right += int((chosen_C == layout.choice_targets.view(-1, len(LETTERS)).argmax(1)).sum())
                total += len(chosen_C)
        return right / total, total


def maxsim_recall(held: HeldOut, trainer: Trainer) -> dict[str, float]:
    """Recall@10 of captions among pictures, and among recordings, by late interaction's scores."""
    network = trainer.network
    assert network.token_head is not None
    found: dict[str, list[tuple[int, torch.Tensor]]] = {"text": [], "image": [], "audio": []}
    with torch.no_grad():
        for batch, items in zip(held.batches, held.items, strict=True):
            layout = BatchLayout.from_batch(batch, "cpu")
            tokens_PW = network.token_head(network.tower(layout))
            for s, item in enumerate(items):
                first = int(layout.start_S[s]) + 1
                found[str(item.modality)].append((item.label, tokens_PW[first : first + int(layout.tokens_S[s])]))
    out: dict[str, float] = {}
    for kind in ("image", "audio"):
        labels = {label for label, _ in found[kind]}
        queries = [(label, tokens) for label, tokens in found["text"] if label in labels]
        scores_QN = maxsim(
            torch.cat([t[:64] for _, t in queries]), torch.cat([t for _, t in found[kind]]),
            _offsets([len(t[:64]) for _, t in queries]), _offsets([len(t) for _, t in found[kind]]),
        )  # fmt: skip
        relevant = [[n for n, (label, _) in enumerate(found[kind]) if label == wanted] for wanted, _ in queries]
        scores: Vectors = scores_QN.numpy()
        # Scores as inner products with the unit vectors of the documents: `retrieve` ranks them like any other.
        out[f"text_to_{kind}"] = retrieve(scores, np.eye(len(found[kind]), dtype=np.float32), relevant).recall[10]
    return out


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int64)


def train(name: str, run: Run, data: Data) -> dict[str, object]:
    """Trains one run; its record."""
    config = run.config()
    held = data.held_out(config)
    batches = data.batches(name, run)
    curve: list[dict[str, object]] = []
    seconds = 0.0
    with Trainer(config) as trainer:
        for step in range(run.steps + 1):
            if step % (run.steps // 4) == 0:
                result = held.evaluate(trainer.network, trainer.device)
                recall = {f"{a}_to_{b}@{k}": result.pairs[a, b].recall[k] for a, b, k in PAIRS}
                chance = {f"{a}_to_{b}@{k}": result.pairs[a, b].chance[k] for a, b, k in PAIRS}
                queries = {f"{a}_to_{b}@{k}": result.pairs[a, b].queries for a, b, k in PAIRS}
                curve.append({"step": step, "loss": result.loss, "losses": dict(result.losses), "recall": recall})
            if step < run.steps:
                start = time.process_time()
                training = trainer.step(next(batches)).stats.loss
                seconds += time.process_time() - start
                if step == run.steps - 1:
                    curve_end = training
        extra: dict[str, object] = {}
        if trainer.network.token_head is not None:
            extra["maxsim"] = maxsim_recall(held, trainer)
        if name.startswith("choices"):
            extra["choice_accuracy"], extra["choices"] = data.choice_accuracy(trainer)
    return {
        "run": name, "seed": run.seed, "hidden": run.hidden, "precision": run.precision, "steps": run.steps,
        "learning_rate": run.learning_rate, "cpu_s": round(seconds, 1), "training_loss": curve_end, "chance": chance, "queries": queries,
        "curve": curve, **extra,
    }  # fmt: skip


def records() -> dict[str, dict[str, object]]:
    """The newest record of every run."""
    if not LINES.exists():
        return {}
    return {record["run"]: record for record in map(json.loads, LINES.read_text(encoding="utf-8").splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="names of runs; none trains those that have no line yet")
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--work", type=Path, help="where packed batches are kept between calls [a temporary folder]")
    parser.add_argument("--list", action="store_true", help="name all runs")
    parser.add_argument("--report", action="store_true", help="train nothing, only rewrite the tables of learning.md")
    arguments = parser.parse_args()
    runs = all_runs()
    if unknown := set(arguments.runs) - set(runs):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; --list names them")
    if arguments.list:
        print("\n".join(runs))
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not arguments.report:
        if not list(arguments.shards.glob("train-*.tar")):
            parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
        with tempfile.TemporaryDirectory() as temporary:
            data = Data(arguments.shards, arguments.work or Path(temporary))
            for name in arguments.runs or [name for name in runs if name not in records()]:
                record = train(name, runs[name], data)
                with LINES.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record, sort_keys=True) + "\n")
                print(f"{name}: {record['cpu_s']} s", flush=True)
    report()


def _share(value: float, queries: int) -> str:
    """A recall in percent with its standard error."""
    return f"{100 * value:.1f} ± {100 * (value * (1 - value) / queries) ** 0.5:.1f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]])


def _objective_table(found: Mapping[str, Any]) -> str:
    names = [f"{a}_to_{b}@{k}" for a, b, k in PAIRS]
    rows: list[list[str]] = []
    for name in (name for name in all_runs() if name in found and not name.startswith("rate-")):
        record = found[name]
        if not rows:
            rows.append(["chance", "", *(f"{100 * record['chance'][n]:.1f}" for n in names), ""])
            rows.append(["untrained", "0", *(_share(record["curve"][0]["recall"][n], record["queries"][n]) for n in names), ""])
        extra = [f"MaxSim {kind.replace('_', ' ')}@10 {100 * value:.1f}" for kind, value in record.get("maxsim", {}).items()]
        if "choice_accuracy" in record:
            extra.append(f"language right {_share(record['choice_accuracy'], record['choices'])} (chance {100 / len(LETTERS):.0f})")
        last = record["curve"][-1]["recall"]
        rows.append([name, f"{record['cpu_s']:.0f}", *(_share(last[n], record["queries"][n]) for n in names), "; ".join(extra)])
    return _table(["run", "CPU s", *(n.replace("_", " ") for n in names), "besides"], rows)


def _curve_table(found: Mapping[str, Any]) -> str:
    steps = [STEPS * quarter // 4 for quarter in range(5)]
    rows = []
    for name in (name for name in all_runs() if name in found and not name.startswith("rate-")):
        curve = found[name]["curve"]
        recalls = [f"{100 * statistics.mean(point['recall'].values()):.1f}" for point in curve]
        terms = sorted(curve[-1]["losses"])
        losses = ["; ".join(f"{t} {point['losses'][t]:.3g}" for t in terms) for point in (curve[0], curve[len(curve) // 2], curve[-1])]
        rows.append([name, *recalls, *losses])
    return _table(["run", *(f"recall, step {s}" for s in steps), "held-out losses at first", "half-way", "at the end"], rows)


def _rate_table(found: Mapping[str, Any]) -> str:
    rows = []
    for (hidden, precision), rates in SWEEP.items():
        for rate in rates:
            if (record := found.get(f"rate-{hidden}-{rate:g}")) is not None:
                curve, training = record["curve"], record["training_loss"]
                recall = statistics.mean(curve[-1]["recall"].values())
                rows.append([f"{hidden}, {precision}", f"{rate:g}", f"{training:.2f}", f"{curve[-1]['loss']:.2f}", f"{100 * recall:.1f}"])
    return _table(["hidden", "peak learning rate", "training loss of the last step", "held-out loss", "mean recall"], rows)


def report() -> None:
    """Rewrites the tables of learning.md."""
    found: Mapping[str, Any] = records()
    text = REPORT.read_text(encoding="utf-8")
    for name, table in (("objectives", _objective_table(found)), ("curves", _curve_table(found)), ("rates", _rate_table(found))):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
