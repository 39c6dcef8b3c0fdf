"""How much of a process's speed is its parent's, and whether a ratio of two forks of one parent is free of that.

    python benchmarks/templates.py [--quick] [--json FILE] [--examples N]

Prints one table. Trials are forks of a template, which has imported TensorFlow. Are forks of two templates that import
the same as fast as two of one? In each repeat three fresh templates have two forks each of two configurations,
and all twelve processes take turns of a tenth of a second. What two forks of one template differ by is theirs, and the
noise of measuring; what more those of two templates differ by is the templates'. The same is asked of the ratio of the
two configurations, which is what a claim is about: what a template gives to both is not in it.

Deviations are of logarithms: 0.02 is two percent. `tf.data`'s own tuning is off, as in `epochs.py`, and why.
"""

import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, parser, report, root_mean_square
from scipy.stats import f

from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.study.slicing import slice_seconds
from autotune.trial.live import WarmUp
from autotune.trial.process import TrialProcess, TrialProcesses
from autotune.workload import parse_reference

WORKLOAD = Path(__file__).with_name("tiled.py")
EXAMPLES = 1_000
"""In an epoch: 32 steps at the small batch, 4 at the large one."""
BATCHES = (32, 256)
TEMPLATES = 3
FORKS = 2
"""Of each configuration, of each template."""
REPEATS, REPEATS_QUICK = 7, 2
ROUNDS, ROUNDS_QUICK = 40, 4
TURN_SECONDS = 0.1
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Component:
    """What templates add to the deviation of their forks, with its interval.

    Args:
        value: Standard deviation, of logarithms; 0 where templates differ by no more than their forks make them.
        low: Lower bound.
        high: Upper bound.
        degrees: Degrees of freedom between templates.
    """

    value: float
    low: float
    high: float
    degrees: int

    @property
    def figure(self) -> Figure:
        """As the table has it."""
        return {
            "value": self.value,
            "ci95": [self.low, self.high],
            "bar": None,
            "count": self.degrees,
        }


def component(between: float, degrees: int, within: float, within_degrees: int) -> Component:
    """The part of a variance between templates that is not their forks', by the distribution of the two's ratio.

    Args:
        between: Variance of templates' means of forks.
        degrees: Its degrees of freedom.
        within: What the forks contribute to that: the variance of a mean of forks.
        within_degrees: Its degrees of freedom.
    """

    def part(ratio: float) -> float:
        return math.sqrt(max(0.0, within * (ratio - 1)))

    ratio = between / within
    low, high = (ratio / f.ppf(level, degrees, within_degrees) for level in (0.975, 0.025))
    return Component(value=part(ratio), low=part(low), high=part(high), degrees=degrees)


@dataclass
class Fork:
    """A fork of a template, and what it trained in its turns.

    Args:
        group: Of its template.
        which: Of the configurations.
        trial: The process.
        warm: What it said when it was warm.
    """

    group: int
    which: int
    trial: TrialProcess
    warm: WarmUp
    examples: int = 0
    seconds: float = 0.0

    def turn(self, length: float) -> None:
        """Let it train for so long."""
        taken = self.trial.measure(length, PATIENCE_SECONDS)
        self.examples += taken.examples
        self.seconds += taken.seconds


def _fork(processes: TrialProcesses, which: int, group: int, examples: int, logs: Path) -> Fork:
    # How many examples there are, the workload reads from the name.
    log = str(logs / f"{examples}-{group}.log")
    trial = processes.launch(_configuration(which), log=log, data=None, group=group)
    return Fork(group=group, which=which, trial=trial, warm=trial.warm_up(PATIENCE_SECONDS))


def _configuration(which: int) -> Configuration:
    return baseline_configuration(BATCHES[which], {}, Device.CPU, where="benchmark")


def speeds(rounds: int, examples: int) -> list[list[list[float]]]:
    """Of fresh templates: by template, by configuration, of each fork the logarithm of its samples per second."""
    groups, kinds = range(1, TEMPLATES + 1), range(len(BATCHES))
    with (
        tempfile.TemporaryDirectory() as folder,
        TrialProcesses(parse_reference(f"{WORKLOAD}:alone"), logs=Path(folder)) as processes,
    ):
        processes.open()
        processes.retire(0)
        for group in groups:
            processes.prepare(group, [_configuration(0)])
        for group in groups:
            processes.await_ready(group)
        places = [(which, group) for group in groups for which in kinds for _ in range(FORKS)]
        forks = [
            _fork(processes, *place, examples, Path(folder)) for place in random.sample(places, len(places))
        ]
        length = slice_seconds(*(each.warm for each in forks), measured=math.inf, wanted=TURN_SECONDS)
        for _ in range(rounds):
            for fork in random.sample(forks, len(forks)):
                fork.turn(length)
    found: list[list[list[float]]] = [[[] for _ in kinds] for _ in groups]
    for each in forks:
        found[each.group - 1][each.which].append(math.log(each.examples / each.seconds))
    return found


def figures(repeats: Sequence[Sequence[Sequence[Sequence[float]]]]) -> dict[str, Figure]:
    """All figures of the table, by name.

    Args:
        repeats: What `speeds` found, again and again.
    """
    found: dict[str, Figure] = {}
    degrees, fork_degrees = len(repeats) * (TEMPLATES - 1), len(repeats) * TEMPLATES
    within = []
    for which, batch in enumerate(BATCHES):
        errors = [
            (template[which][0] - template[which][1]) / math.sqrt(FORKS)
            for each in repeats
            for template in each
        ]
        found[f"batch {batch}: forks of one template"] = root_mean_square(errors)
        within.append(statistics.fmean(error**2 for error in errors) / FORKS)
        means = [[statistics.fmean(template[which]) for template in each] for each in repeats]
        between = statistics.fmean(map(statistics.variance, means))
        part = component(between, degrees, within[-1], fork_degrees)
        found[f"batch {batch}: templates, beyond their forks"] = part.figure
    ratios = [
        [statistics.fmean(large) - statistics.fmean(small) for small, large in each] for each in repeats
    ]
    between = statistics.fmean(map(statistics.variance, ratios))
    part = component(between, degrees, math.fsum(within), len(BATCHES) * fork_degrees)
    found["ratio of both batches: templates, beyond their forks"] = part.figure
    return found


def main() -> None:
    """Measure, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--examples", type=int, default=EXAMPLES, help="in an epoch")
    given = arguments.parse_args()
    repeats = REPEATS_QUICK if given.quick else REPEATS
    rounds = ROUNDS_QUICK if given.quick else ROUNDS
    report("templates", figures([speeds(rounds, given.examples) for _ in range(repeats)]), given.json)


if __name__ == "__main__":
    main()
