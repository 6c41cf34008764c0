"""A thousand workers, ten million units, and a worker that dies every minute, on paper.

What is known of one machine (how long an engine takes for a task, a journal for a line) is played
through, event by event. Assumed: the times of units are spread log-normally around their mean; a
worker that dies loses what it was computing and what waited for it, and is back, with its program
compiled, after a while; one scheduler handles one task at a time; storage keeps up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

WORKERS, UNITS = 1000, 10_000_000
DEATHS = 60.0  # seconds between two
BACK = 30.0  # seconds until a worker is back
SPREAD = 0.3  # of the logarithm of a unit's time
IN_FLIGHT = 2  # units for each worker


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
      name: what reports call it.
      unit: seconds that a unit takes on average.
      task: seconds that the scheduler takes for each; zero if there is none.
    """

    name: str
    unit: float
    task: float


@dataclass(frozen=True)
class Simulated:
    """What came of it.

    Attributes:
      case: what was simulated.
      workers, units: how many.
      hours: how long it took.
      lost: by how much that is longer than the units' own time, shared by all workers.
      again: how many units were computed again.
      busy: the share of the time in which the scheduler was busy.
    """

    case: Case
    workers: int
    units: int
    hours: float
    lost: float
    again: int
    busy: float


def simulated(case: Case, workers: int = WORKERS, units: int = UNITS, seed: int = 0) -> Simulated:
    """Plays a case through."""
    rng = np.random.default_rng(seed)
    scale = case.unit / np.exp(SPREAD**2 / 2)
    drawn: list[float] = []

    def duration() -> float:
        if not drawn:
            drawn.extend((scale * np.exp(SPREAD * rng.standard_normal(100_000))).tolist())
        return drawn.pop()

    left, again, free, busy = units, 0, 0.0, 0.0
    waiting = [0] * workers  # units that a worker has, and has not begun
    life = [0] * workers  # how often it died: what was to happen to one that is dead does not
    working = [False] * workers
    events: list[tuple[float, int, int, int]] = []  # when, what, who, of which life
    arrives, ends, returns, dies = range(4)

    def ask(now: float, who: int) -> None:
        """The scheduler sends a unit, when it gets to it."""
        nonlocal left, free, busy
        if left == 0:
            return
        left -= 1
        free = max(free, now) + case.task
        busy += case.task
        heapq.heappush(events, (free, arrives, who, life[who]))

    def begin(now: float, who: int) -> None:
        if waiting[who] and not working[who]:
            waiting[who] -= 1
            working[who] = True
            heapq.heappush(events, (now + duration(), ends, who, life[who]))

    on_the_way = [0] * workers
    for who in range(workers):
        for _ in range(IN_FLIGHT):
            on_the_way[who] += left > 0
            ask(0.0, who)
    heapq.heappush(events, (DEATHS, dies, -1, 0))
    done, now = 0, 0.0
    while done < units:
        now, what, who, of = heapq.heappop(events)
        if what == dies:
            who = int(rng.integers(workers))
            gone = waiting[who] + working[who] + on_the_way[who]
            again += waiting[who] + working[who]
            left += gone
            waiting[who], working[who], on_the_way[who] = 0, False, 0
            life[who] += 1
            heapq.heappush(events, (now + BACK, returns, who, life[who]))
            heapq.heappush(events, (now + rng.exponential(DEATHS), dies, -1, 0))
        elif of != life[who]:
            continue
        elif what == returns:
            for _ in range(IN_FLIGHT):
                on_the_way[who] += left > 0
                ask(now, who)
        elif what == arrives:
            on_the_way[who] -= 1
            waiting[who] += 1
            begin(now, who)
        else:
            done += 1
            working[who] = False
            begin(now, who)
            on_the_way[who] += left > 0
            ask(now, who)
    ideal = units * case.unit / workers
    return Simulated(case, workers, units, now / 3600, now / ideal - 1, again, busy / now)
