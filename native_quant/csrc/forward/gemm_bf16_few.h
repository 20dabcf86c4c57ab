/* `few` of kt_bf16_steps, for each coding and number of tokens. A file that includes this must define TARGET, the
 * attribute of its functions; few, an inline function that takes the coding, the number of tokens, and the work; and
 * FEW(X), which is X(coding, tokens) for each. The table is {FEW(KT_NAME_FEW)}. */
#define KT_UP_TO_3(X, CODING) X(CODING, 1) X(CODING, 2) X(CODING, 3)
#define KT_UP_TO_4(X, CODING) KT_UP_TO_3(X, CODING) X(CODING, 4)
#define KT_UP_TO_6(X, CODING) KT_UP_TO_4(X, CODING) X(CODING, 5) X(CODING, 6)
#define DEFINE(CODING, N)                                                                                              \
    TARGET static void few_##CODING##_##N(const kt_bf16_block *work) {                                                 \
        few(CODING, N, work);                                                                                          \
    }
FEW(DEFINE)
#undef DEFINE
#define KT_NAME_FEW(CODING, N) [CODING][N - 1] = few_##CODING##_##N,
