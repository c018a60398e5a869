"""Settings of the Jacobi decoders, in short."""

from tests.decoders.support import decoder_settings


def jacobi(block_size, window="fixed"):
    return decoder_settings("jacobi", block_size=block_size, window=window)


def multi(block_size, blocks=2, *, ratio=0.5, verify=4, pool=4):
    return decoder_settings(
        "multiblock_jacobi",
        block_size=block_size,
        blocks=blocks,
        spawn_ratio=ratio,
        verify_size=verify,
        pool_size=pool,
    )
