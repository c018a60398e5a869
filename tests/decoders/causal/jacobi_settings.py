"""Settings of the Jacobi decoders, in short."""

from draftmill.decoders.causal.settings import JacobiSettings, MultiblockJacobiSettings


def jacobi(block_size, window="fixed"):
    return JacobiSettings(kind="jacobi", block_size=block_size, window=window)


def multi(block_size, blocks=2, *, ratio=0.5, verify=4, pool=4):
    return MultiblockJacobiSettings(
        kind="multiblock_jacobi",
        block_size=block_size,
        blocks=blocks,
        spawn_ratio=ratio,
        verify_size=verify,
        pool_size=pool,
    )
