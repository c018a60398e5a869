"""Settings of the Jacobi decoders, in short."""

from decoders.settings import Jacobi, MultiblockJacobi


def jacobi(block_size, window="fixed"):
    return Jacobi(kind="jacobi", block_size=block_size, window=window)


def multi(block_size, blocks=2, *, ratio=0.5, verify=4, pool=4):
    return MultiblockJacobi(
        kind="multiblock_jacobi",
        block_size=block_size,
        blocks=blocks,
        spawn_ratio=ratio,
        verify_size=verify,
        pool_size=pool,
    )
