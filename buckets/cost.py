"""`CostModel`: predicted seconds of one step at a shape, from figures first and from steps later.

Owns the sources and their order of trust: steps observed on this device, then the estimates made
at warm-up, then roofline arithmetic. Doesn't know requests, clocks or chips: figures are passed in.

    observed      (base(shape) + sum of slope * amount) * pace, slopes >= 0
    before that   prior(shape, amounts) * median of observed / prior over the other shapes

The amounts of a step are the KV positions it reads, its query-key pairs, and named features of
whoever adds some (tokens to experts, bytes of collectives, ...). Within one shape a prediction
never falls when an amount grows. Slopes are shared by all shapes, as a position costs the same to
read whatever the batch; the base of a shape is the median of what its last steps took beside that.
The pace is how much slower than that the last few steps were, whatever their shapes: neighbours on
a host and clocks that are throttled slow all shapes at once, for seconds.
The fit is Huber's (P. J. Huber, Robust Estimation of a Location Parameter, 1964) by iterated
reweighting, with the slopes kept at or above 0 by coordinate descent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from buckets.device_profile import DeviceProfile
from buckets.shape import StepShape

Source = Literal["observed", "estimate", "roofline"]
Array = NDArray[np.float64]

KV, ATTENTION = "kv_tokens_read", "attention_work"
MIN_S, MAX_S = 1e-6, 600.0
# A prediction stays within this factor of what its shape's steps or its prior say.
BOUND = 4.0
_HUBER = 1.345  # in median absolute deviations: 95 % as efficient as least squares on clean data
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does beside its shape; every amount is at least 0 and finite.

    Attributes:
        kv_tokens_read: KV positions read, over all rows.
        attention_work: query-key pairs that are not masked, over all rows.
        features: more amounts by name; one that was never seen counts for nothing.
    """

    kv_tokens_read: float = 0.0
    attention_work: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        for name, amount in self.amounts().items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {amount}")

    def amounts(self) -> dict[str, float]:
        return {KV: self.kv_tokens_read, ATTENTION: self.attention_work} | dict(self.features)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least a step can take: bytes over bandwidth or operations over peak, all per device.

    The defaults stand for an ordinary processor with a small model; observations correct them.
    `is_exact` says that bandwidth and peak are the chip's own, so that nothing can be faster.
    Collectives are left out.
    """

    bytes_per_s: float = 1e10
    flops_per_s: float = 1e11
    weight_bytes: float = 1e9
    flops_per_token: float = 1e9
    flops_per_logit_row: float = 0.0
    kv_token_bytes: float = 1e4
    flops_per_pair: float = 1e5
    fixed_s: float = 1e-4
    is_exact: bool = False

    def seconds(self, shape: StepShape, work: Work) -> float:
        num_bytes = self.weight_bytes + work.kv_tokens_read * self.kv_token_bytes
        flops = shape.num_tokens * self.flops_per_token
        flops += shape.num_logit_rows * self.flops_per_logit_row
        flops += work.attention_work * self.flops_per_pair
        return self.fixed_s + max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """How much is remembered and how much is believed.

    Attributes:
        window: observations kept per shape.
        pace_window: last steps that the pace is the median of.
        skip: first runs of each shape that are not looked at.
        min_observations: of a shape, before its own are believed.
        refit_every: observations between two fits of the slopes.
        error_window: predictions that the recent error is the median of.
        max_error: recent relative error up to which the model is trusted.
        min_scored: predictions to be scored before it can be trusted.
    """

    window: int = 48
    pace_window: int = 9
    skip: int = 1
    min_observations: int = 3
    refit_every: int = 64
    error_window: int = 64
    max_error: float = 0.25
    min_scored: int = 16


@dataclass(slots=True)
class _Seen:
    """The last steps of one shape: amounts, seconds, and seconds beside what the amounts cost.

    `num` counts all steps of the shape.
    """

    amounts: deque[dict[str, float]]
    taken_s: deque[float]
    rest_s: deque[float]
    num: int = 0
    base_s: float = 0.0
    least_s: float = 0.0
    most_s: float = 0.0

    @classmethod
    def of(cls, window: int) -> _Seen:
        return cls(deque(maxlen=window), deque(maxlen=window), deque(maxlen=window))

    def add(self, amounts: dict[str, float], taken_s: float, slope_s: float) -> None:
        self.amounts.append(amounts)
        self.taken_s.append(taken_s)
        self.rest_s.append(taken_s - slope_s)
        self.base_s = _middle(self.rest_s)
        self.least_s, self.most_s = min(self.taken_s), max(self.taken_s)


class CostModel:
    """Predicts and learns; see the module."""

    def __init__(
        self,
        roofline: Roofline | None = None,
        profile: DeviceProfile | None = None,
        options: CostOptions | None = None,
    ) -> None:
        """`profile` gives estimates and measured seconds per shape, for a step that reads no KV."""
        self._roofline = Roofline() if roofline is None else roofline
        self._profile = profile
        self._options = CostOptions() if options is None else options
        self._seen: dict[StepShape, _Seen] = {}
        self._slopes: dict[str, float] = {}
        self._since_fit = 0
        self._errors: deque[float] = deque(maxlen=self._options.error_window)
        self._ratio = 1.0
        self._paces: deque[float] = deque(maxlen=self._options.pace_window)
        self._pace = 1.0

    @property
    def recent_error(self) -> float | None:
        """Median of |predicted - observed| / observed of the last steps; None before any."""
        return float(np.median(self._errors)) if self._errors else None

    @property
    def is_trusted(self) -> bool:
        """Whether enough predictions were scored and their recent error is small."""
        options, error = self._options, self.recent_error
        enough = len(self._errors) >= options.min_scored
        return enough and error is not None and error <= options.max_error

    def source(self, shape: StepShape) -> Source:
        """Where a prediction for `shape` comes from now."""
        if self._is_observed(shape):
            return "observed"
        return "roofline" if self._known_s(shape) is None else "estimate"

    def predict(self, shape: StepShape, work: Work) -> float:
        """Seconds of a step, between `MIN_S` and `MAX_S`."""
        return self._paced(shape, work, self._pace)

    def observe(self, shape: StepShape, work: Work, seconds: float) -> None:
        """Takes note of a step that took `seconds`; nonsense (0, NaN, hours) is left out."""
        if not (math.isfinite(seconds) and 0 < seconds <= MAX_S):
            return
        options = self._options
        seen = self._seen.get(shape)
        if seen is None:
            seen = self._seen[shape] = _Seen.of(options.window)
        seen.num += 1
        if seen.num <= options.skip:
            return
        steady_s = self._paced(shape, work, 1.0)
        predicted_s = self._paced(shape, work, self._pace)
        self._errors.append(abs(predicted_s - seconds) / seconds)
        if self._is_observed(shape):
            self._paces.append(seconds / steady_s)
            self._pace = _middle(self._paces)
        amounts = work.amounts()
        seen.add(amounts, seconds, self._slope_s(amounts))
        self._since_fit += 1
        if self._since_fit >= options.refit_every:
            self._since_fit = 0
            self._fit()
            self._calibrate()
        elif len(seen.taken_s) == options.min_observations:
            self._calibrate()

    def _paced(self, shape: StepShape, work: Work, pace: float) -> float:
        prior_s = self._prior(shape, work) * self._ratio
        if not self._is_observed(shape):
            return _clip(prior_s, MIN_S, MAX_S)
        seen = self._seen[shape]
        seconds = (seen.base_s + self._slope_s(work.amounts())) * pace
        most = BOUND * max(seen.most_s, prior_s)
        return _clip(_clip(seconds, seen.least_s / BOUND, most), MIN_S, MAX_S)

    def _is_observed(self, shape: StepShape) -> bool:
        seen = self._seen.get(shape)
        return seen is not None and len(seen.taken_s) >= self._options.min_observations

    def _known_s(self, shape: StepShape) -> float | None:
        if self._profile is None:
            return None
        facts = self._profile.of(shape)
        if facts.measured_step_s is not None or facts.estimated_step_s is None:
            return facts.measured_step_s
        # The compiler prices a scanned body once and some kernels not at all.
        least_s = self._roofline.seconds(shape, Work()) if self._roofline.is_exact else 0.0
        return max(facts.estimated_step_s, least_s)

    def _prior(self, shape: StepShape, work: Work) -> float:
        """What is known without observations; the estimate lacks what the KV at hand costs."""
        least_s = self._roofline.seconds(shape, work)
        known_s = self._known_s(shape)
        if known_s is None:
            return least_s
        return known_s + least_s - self._roofline.seconds(shape, Work())

    def _slope_s(self, amounts: Mapping[str, float]) -> float:
        return sum(self._slopes.get(name, 0.0) * amount for name, amount in amounts.items())

    def _calibrate(self) -> None:
        """How far the priors are off, by the shapes that were observed."""
        ratios: list[float] = []
        for shape, seen in self._seen.items():
            if self._is_observed(shape):
                prior_s = self._prior(shape, _work(seen.amounts[-1]))
                ratios.append(seen.taken_s[-1] / prior_s)
        if ratios:
            self._ratio = float(np.median(ratios))

    def _fit(self) -> None:
        """Fits the slopes to all that is remembered, each shape by its own medians."""
        known = [s for s in self._seen.values() if len(s.taken_s) >= self._options.min_observations]
        names = sorted({name for seen in known for a in seen.amounts for name in a})
        columns: list[Array] = []
        targets: list[Array] = []
        for seen in known:
            x = np.array([[a.get(name, 0.0) for name in names] for a in seen.amounts])
            y = np.array(seen.taken_s)
            middle = float(np.median(y))
            # Relative errors count, or the largest steps would decide everything.
            columns.append((x - np.median(x, axis=0)) / middle)
            targets.append((y - middle) / middle)
        if not columns:
            return
        slopes = _huber_slopes(np.concatenate(columns), np.concatenate(targets))
        self._slopes = dict(zip(names, slopes.tolist(), strict=True))
        for seen in self._seen.values():
            pairs = list(zip(seen.amounts, seen.taken_s, strict=True))
            seen.rest_s.clear()
            seen.rest_s.extend(taken_s - self._slope_s(amounts) for amounts, taken_s in pairs)
            seen.base_s = _middle(seen.rest_s) if pairs else 0.0


def _huber_slopes(x: Array, y: Array) -> Array:
    """Slopes >= 0 of `y [n]` on `x [n, k]`, without an intercept; outliers count little."""
    scale = np.sqrt((x * x).mean(axis=0))
    usable = scale > 0
    slopes = np.zeros(x.shape[1])
    if not usable.any():
        return slopes
    scaled = x[:, usable] / scale[usable]
    found = np.zeros(scaled.shape[1])
    for _ in range(_ROUNDS):
        residuals = y - scaled @ found
        spread = float(np.median(np.abs(residuals - np.median(residuals)))) / 0.6745
        limit = _HUBER * max(spread, 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-12))
        found = _nonnegative(scaled, y, weights, found)
    slopes[usable] = found / scale[usable]
    return slopes


def _nonnegative(x: Array, y: Array, weights: Array, start: Array) -> Array:
    """Weighted least squares with coefficients >= 0, by coordinate descent.

    A slight pull to 0 keeps columns that say the same from trading places without end.
    """
    gram = (x * weights[:, None]).T @ x + 1e-6 * len(y) * np.eye(x.shape[1])
    moment = (x * weights[:, None]).T @ y
    found = start.copy()
    for _ in range(10):
        for i in range(len(found)):
            rest = moment[i] - gram[i] @ found + gram[i, i] * found[i]
            found[i] = max(0.0, rest / gram[i, i])
    return found


def _work(amounts: Mapping[str, float]) -> Work:
    features = {name: amount for name, amount in amounts.items() if name not in (KV, ATTENTION)}
    return Work(amounts[KV], amounts[ATTENTION], features)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _middle(values: Iterable[float]) -> float:
    """The median; of an even number, the upper of the two."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
