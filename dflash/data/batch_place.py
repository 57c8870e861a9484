"""Whether a place in the sequence of packs is one that a run over these shards can have come to."""

from __future__ import annotations

from dflash.data.batches import BatchOrder, BatchState, ShardSource


def place_problem(order: BatchOrder, state: BatchState, source: ShardSource) -> str | None:
    """Say what of a place can't be, None where all fits.

    Its tokens say within one shard where it lies, and its packs are at most its rows: a digest only tells that a record
    is as somebody wrote it, and a place beyond the data would end a run as done that never trained.

    Args:
        order: of the run.
        state: the place.
        source: the shards that it is a place in.
    """
    num_shards = len(source.num_rows)
    if state.shard >= num_shards:
        return f"shard {state.shard} of {num_shards}"
    shards = order.shards(num_shards, state.epoch)
    here, done = shards[state.shard], shards[: state.shard]
    rows, tokens = source.num_rows[here], source.num_tokens[here]
    num_windows = max(1, -(-rows // order.window_rows))
    if state.window >= num_windows or state.pack > order.window_rows:
        return f"pack {state.pack} of window {state.window} in a shard of {rows} rows, {order.window_rows} a window"
    before = state.epoch * sum(source.num_tokens) + sum(source.num_tokens[shard] for shard in done)
    if not before <= state.num_tokens <= before + tokens:
        where = f"in shard {state.shard} of epoch {state.epoch}"
        return f"{state.num_tokens} tokens, expected {before} to {before + tokens} {where}"
    most = state.epoch * sum(source.num_rows) + sum(source.num_rows[shard] for shard in done) + rows
    if state.num_packs > most:
        return f"{state.num_packs} packs of {most} rows"
    return None
