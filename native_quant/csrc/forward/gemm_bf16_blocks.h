/* `block` for each number of tokens. A file that includes this must define TARGET, the attribute of its functions;
 * block, an inline function that takes the number of tokens first, and the work; and BLOCKS(X), which is
 * X(1) .. X(BLOCK). */
#define DEFINE(N)                                                                                                      \
    TARGET static void block_##N(const kt_bf16_block *work) {                                                          \
        block(N, work);                                                                                                \
    }
BLOCKS(DEFINE)
#undef DEFINE
#define NAME(N) block_##N,
static void run_block(const kt_bf16_block *work) {
    static kt_bf16_block_fn *const blocks[BLOCK] = {BLOCKS(NAME)};
    blocks[work->tokens - 1](work);
}
#undef NAME
