"""Rows of different lengths: the pass for them, and how they come to run in which way."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs, Pass, Way, execute
from batchax.execution.chunked import Chunking
from batchax.execution.devices.shards import Shards
from batchax.frontend.rows import RowOptions, runs_rows
from batchax.kernel import recording
from batchax.rows.arguments import all_known, check_meshes, find_sizes
from batchax.rows.by_answer import run_by_answer
from batchax.rows.by_length import run_by_length
from batchax.rows.by_switch import MOST_LENGTHS, are_few, run_by_switch
from batchax.rows.call import RowCall
from batchax.rows.comparisons import ASKED_FOR_NUMBERS
from batchax.rows.found_places import find_found
from batchax.rows.host_calls import refuse_order
from batchax.rows.in_buckets import by_bucket, run_in_buckets
from batchax.rows.in_padding import execute_padded
from batchax.rows.in_regions import InRegions, most_classes
from batchax.rows.on_devices import RowsOnDevices
from batchax.rows.padded import CannotPad
from batchax.rows.refusals import cannot_pad, cannot_stage, why_grouped, works_for_known


@runs_rows
def in_rows(options: RowOptions, shards: Shards | None, chunking: Chunking | None) -> Pass:
    """The pass for calls some of whose arguments are `Ragged`."""

    def change(call: Call) -> Call:
        # Rows are moved about before they are on their devices.
        mapped = [
            replace(m, value=jnp.asarray(m.value)) if isinstance(m.value, np.ndarray) else m
            for m in call.mapped
        ]
        return replace(call, mapped=mapped, way=InRows(options, shards, chunking))

    return change


@dataclass(frozen=True)
class InRows(Way):
    """Rows in whatever way is theirs: in buckets, by length, on devices, packed or padded.

    Attributes:
      options: what was asked for.
      shards: the devices that rows are dealt out to, if the user said so.
      chunking: how many rows run at a time where they are arrays; None for all.
      of_bucket: whether there are other rows, in other buckets.
    """

    makes_calls: ClassVar[bool] = True

    options: RowOptions
    shards: Shards | None = None
    chunking: Chunking | None = None
    of_bucket: bool = False

    @_compat.standing_in()
    def run(self, call: Call) -> Outputs:
        axis, mapped, buckets = call.axis, call.mapped, self.options.buckets
        if not isinstance(axis.size, int):
            raise UnsupportedError(
                f"the number of rows is {axis.size}, a symbolic size, but where rows are must be "
                "known. Export the function for a known number of rows, whatever their lengths are."
            )
        check_meshes(mapped)
        recording.fact("rows", axis=axis)
        if buckets is not None and by_bucket(axis, mapped, buckets):
            options = replace(self.options, buckets=None)
            each = replace(self, options=options, of_bucket=True)
            return run_in_buckets(replace(call, way=each), buckets)
        if self.options.layout == "grouped":
            if self.shards is not None:
                raise UnsupportedError(
                    'mesh was given, and layout="grouped": which rows have one length is known '
                    "before they are dealt out to devices. Leave one of them out."
                )
            return run_by_length(call, self.chunking)
        lengths_known = all_known(mapped) and self.shards is None
        outs = self._of_any_length(RowCall.of(call), lengths_known)
        if isinstance(outs, Exception):
            return run_by_length(call, self.chunking, why_grouped(outs))
        return outs

    def _of_any_length(self, call: RowCall, lengths_known: bool) -> Outputs | Exception:
        """What a call returns that is staged once for rows of any length.

        An error where that cannot be, but lengths are known: rows of one length may run together.
        """
        try:
            call = call.with_program()
        except Exception as error:
            # The function may need sizes as numbers, for an `if n > 5`: rows of one length have
            # these. If it is wrong, it fails again.
            if lengths_known:
                return error
            works = lambda: works_for_known(call.staged_for, call.sizes)
            return self._by_switch(call, functools.partial(cannot_stage, error, call.sizes, works))
        if self.of_bucket:
            refuse_order(call.staged)
        way: Way = AnyLength(self.options, self.chunking, self.of_bucket)
        if self.shards is not None:
            way = RowsOnDevices(self.shards, way, call.tells_of_mesh)
        try:
            return execute(replace(call, way=way))
        except ASKED_FOR_NUMBERS as error:  # in a derivative rule, which is staged by now
            if lengths_known:
                return error
            told = functools.partial(cannot_stage, error, call.sizes, lambda: True)
            return self._by_switch(call, told)
        except CannotPad as error:
            if lengths_known:
                return error
            on_mesh = self.shards is not None
            return self._by_switch(call, functools.partial(cannot_pad, error, call.sizes, on_mesh))

    def _by_switch(self, call: Call, told: functools.partial[Exception]) -> Outputs:
        """By a branch for each length, if that can be; else raises what is `told` of an error."""
        if self.shards is None and self.options.layout == "auto":
            outs = run_by_answer(call, self.chunking, told.args[0])
            outs = run_by_switch(call, self.chunking) if outs is None else outs
            if outs is not None:
                return outs
        cause, raised = told.args[0], told()
        sizes = find_sizes(call.mapped)[1]
        if isinstance(raised, UnsupportedError) and not are_few(sizes):
            several = "" if len(sizes) == 1 else ", or, of several sizes, so many together"
            raised.add_note(
                f"Where the Ragged has a max_length of at most {MOST_LENGTHS - 1}{several}, a "
                "program for each length is compiled instead."
            )
        hidden = isinstance(cause, CannotPad)
        raise raised from (None if hidden else _compat.without_hidden_frames(cause))


@dataclass(frozen=True)
class AnyLength(Way):
    """Rows of any length, all in one place: region by region, or all padded.

    Attributes:
      options: what was asked for.
      chunking: how many padded rows run at a time; None for all.
      of_bucket: whether these are rows of a bucket, as many of which there are as was asked for.
    """

    makes_calls: ClassVar[bool] = True

    options: RowOptions
    chunking: Chunking | None
    of_bucket: bool = False

    def run(self, call: Call) -> Outputs:
        assert isinstance(call, RowCall)
        in_chunks = self.chunking is not None and self.chunking.applies_to(call.axis.size)
        classes = None if self.of_bucket else most_classes(call, self.options, in_chunks)
        finds = find_found(call.staged)
        if classes is None and (in_chunks or finds or _compat.calls_back(call.staged.effects)):
            # Regions would not keep the order in which programs call the host, and hand no sizes on
            # that one of them finds.
            return execute_padded(call, self.chunking)
        return execute(replace(call, way=InRegions(self.options.layout, classes)))
