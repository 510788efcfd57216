"""`SlotTable`: the state of every admitted sequence as NumPy columns, one entry per slot.

Owns the columns, so that choosing rows and building a step are array operations, not Python per
token. Doesn't know policy, time or the page pool: pages come in and go out as arrays.

Of a slot's `total` tokens (those the host knows plus those sampled but not read back), `planned`
are in the KV cache or in a dispatched step. Below `target` they are prompt (or recomputed) tokens;
from there on the slot decodes, one token behind `total`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from buckets.shape import StepShape
from tpu_engine.scheduler.sequence import Sequence
from tpu_engine.step_plan import Bool, Int32, SamplingColumns, StepPlan


class SlotTable:
    """Columns `[num_slots]` and page tables `[num_slots, pages_per_seq]`; epoch 0 means vacant.

    An epoch belongs to one stay of one sequence in one slot and is never used again.
    """

    def __init__(self, num_slots: int, pages_per_seq: int, page_size: int) -> None:
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.epoch = np.zeros(num_slots, np.int32)
        self.request_id = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int32)
        self.target = np.zeros(num_slots, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.unread = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.in_flight = np.zeros(num_slots, np.int32)
        self.last_token = np.zeros(num_slots, np.int32)
        self.last_step = np.zeros(num_slots, np.int64)
        self.num_pages = np.zeros(num_slots, np.int32)
        self.page_table = np.zeros((num_slots, pages_per_seq), np.int32)
        self._sampling = SamplingColumns(
            temperature=np.zeros(num_slots, np.float32),
            top_k=np.zeros(num_slots, np.int32),
            top_p=np.ones(num_slots, np.float32),
            min_p=np.zeros(num_slots, np.float32),
            seed=np.zeros(num_slots, np.uint32),
        )
        self._vacant = list(range(num_slots - 1, -1, -1))
        self._next_epoch = 1

    @property
    def num_occupied(self) -> int:
        return len(self.sequences) - len(self._vacant)

    @property
    def num_vacant(self) -> int:
        return len(self._vacant)

    @property
    def planned(self) -> Int32:
        """Tokens per slot that are computed or in a dispatched step."""
        return self.computed + self.in_flight

    @property
    def total(self) -> Int32:
        """Tokens per slot, counting those sampled on the device and not read back."""
        return self.known + self.unread

    @property
    def occupied(self) -> Bool:
        return self.epoch > 0

    @property
    def prefilling(self) -> Bool:
        return self.occupied & (self.planned < self.target)

    @property
    def decodable(self) -> Bool:
        """Slots that may compute one more token: past their prompt and below their limit."""
        return self.occupied & (self.planned >= self.target) & (self.total < self.limit)

    @property
    def finishing(self) -> Bool:
        """Slots whose last allowed token is being computed: they end when it is read back."""
        return self.occupied & (self.total >= self.limit)

    def oldest_first(self, mask: Bool) -> NDArray[np.int64]:
        """The slots of `mask` in the order in which they were admitted."""
        slots = np.flatnonzero(mask)
        return slots[np.argsort(self.epoch[slots])]

    def pages_for(self, num_tokens: Int32) -> Int32:
        """Pages that hold so many token positions, elementwise."""
        return -(-num_tokens // self.page_size)

    def pages_reserved(self, growth_pages: int) -> int:
        """Pages the admitted sequences may still ask for soon.

        What is missing of each prompt, and `growth_pages` more, but never more than a sequence
        can use before its limit.
        """
        base = np.where(self.prefilling, self.pages_for(self.target), self.num_pages)
        goal = np.minimum(base + growth_pages, self.pages_for(self.limit - 1))
        wanted = np.maximum(goal - self.num_pages, 0)
        return int(wanted[self.occupied].sum())

    def place(self, sequence: Sequence) -> int:
        """Gives `sequence` a vacant slot (there must be one), nothing of it computed."""
        slot = self._vacant.pop()
        self.sequences[slot] = sequence
        self.epoch[slot] = self._next_epoch
        self._next_epoch += 1
        self.request_id[slot] = sequence.request.request_id
        self.limit[slot] = sequence.limit
        self.target[slot] = self.known[slot] = sequence.num_known
        self.last_token[slot] = sequence.tokens[sequence.num_known - 1]
        for column in (self.unread, self.computed, self.in_flight, self.last_step):
            column[slot] = 0
        params = sequence.request.params
        self._sampling.temperature[slot] = params.temperature
        self._sampling.top_k[slot] = params.top_k
        self._sampling.top_p[slot] = params.top_p
        self._sampling.min_p[slot] = params.min_p
        self._sampling.seed[slot] = params.seed % 2**32
        return slot

    def vacate(self, slot: int) -> Int32:
        """Empties `slot`; returns the pages it held, whose owner is now the caller."""
        pages = self.page_table[slot, : self.num_pages[slot]].copy()
        self.page_table[slot] = 0
        self.num_pages[slot] = 0
        self.epoch[slot] = 0
        self.sequences[slot] = None
        self._vacant.append(slot)
        return pages

    def at(self, slot: int) -> Sequence:
        """The sequence in an occupied slot."""
        sequence = self.sequences[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} is vacant")
        return sequence

    def missing_pages(self, slots: NDArray[np.int64], num_tokens: Int32) -> Int32:
        """Pages each slot lacks to compute `num_tokens` more tokens."""
        held = self.num_pages[slots]
        return np.maximum(self.pages_for(self.planned[slots] + num_tokens) - held, 0)

    def give_pages(self, slots: NDArray[np.int64], counts: Int32, pages: Int32) -> None:
        """Appends `counts[i]` of `pages` (taken in order) to the table of `slots[i]`."""
        owner = np.repeat(slots, counts)
        within = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.page_table[owner, self.num_pages[owner] + within] = pages
        self.num_pages[slots] += counts

    def dispatch(
        self, step_id: int, shape: StepShape, slots: NDArray[np.int64], num_tokens: Int32
    ) -> StepPlan:
        """Takes a snapshot of the rows `slots` as a plan and counts their tokens as in flight.

        A row samples when it reaches the sequence's last token, known to the host or not.
        """
        starts = self.planned[slots]
        samples = starts + num_tokens == self.total[slots]
        on_device = samples & (self.unread[slots] > 0)
        plan = StepPlan(
            step_id=step_id,
            shape=shape,
            request_ids=self.request_id[slots],
            epochs=self.epoch[slots],
            slots=slots.astype(np.int32),
            starts=starts,
            num_tokens=num_tokens,
            samples=samples,
            last_on_device=on_device,
            token_ids=self._token_ids(slots, starts, num_tokens, on_device),
            page_table=self.page_table[slots],
            sampling=SamplingColumns(
                temperature=self._sampling.temperature[slots],
                top_k=self._sampling.top_k[slots],
                top_p=self._sampling.top_p[slots],
                min_p=self._sampling.min_p[slots],
                seed=self._sampling.seed[slots],
            ),
        )
        self.in_flight[slots] += num_tokens
        self.unread[slots] += samples
        self.last_step[slots] = step_id
        return plan

    def land(self, slots: Int32, num_tokens: Int32, samples: Bool, token_ids: Int32) -> None:
        """Counts a collected step's rows as computed and their sampled tokens as known."""
        self.computed[slots] += num_tokens
        self.in_flight[slots] -= num_tokens
        self.unread[slots] -= samples
        self.known[slots] += samples
        self.last_token[slots] = np.where(samples, token_ids, self.last_token[slots])

    def _token_ids(
        self, slots: NDArray[np.int64], starts: Int32, num_tokens: Int32, on_device: Bool
    ) -> Int32:
        ends = np.cumsum(num_tokens)
        token_ids = np.zeros(int(ends[-1]), np.int32)
        decoding = starts >= self.target[slots]
        last = np.where(on_device, 0, self.last_token[slots])
        token_ids[ends[decoding] - 1] = last[decoding]
        for row in np.flatnonzero(~decoding).tolist():
            start, count, end = int(starts[row]), int(num_tokens[row]), int(ends[row])
            token_ids[end - count : end] = self.at(int(slots[row])).tokens[start : start + count]
        return token_ids
