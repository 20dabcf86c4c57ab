/* Attention of queries that share keys to a span of keys: products, their exponentials, and the weighted values. */
#include <math.h>

#include "exponential_template.h"

typedef float kt_scores[KT_SPAN_QUERIES][KT_SPAN];

/* Requests the rows of values that belong to these keys: they are needed when the products are known. */
TARGET static inline void request_values(const kt_span *span, int64_t first, int64_t keys) {
    const uint8_t *end = span->v + 2 * (first + keys) * span->value_size;
    for (const uint8_t *line = span->v + 2 * first * span->value_size; line < end; line += 64) fetch_to_l2(line);
}

TARGET static inline void score_keys(const kt_span *span, kt_scores scores) {
    enum { TOGETHER = 32 };
    float products[TOGETHER * KTQ_ROW_TOKENS];
    for (int64_t key = 0; key < span->keys; key += TOGETHER) {
        const int64_t rows = span->keys - key < TOGETHER ? span->keys - key : TOGETHER;
        request_values(span, key, rows);
        for (int64_t q = 0; q < span->queries; q += KTQ_ROW_TOKENS) {
            const int64_t m = span->queries - q < KTQ_ROW_TOKENS ? span->queries - q : KTQ_ROW_TOKENS;
            KERNEL_OF(row_products)(&(kt_row_products){.rows = rows,
                                                       .k = span->size,
                                                       .m = m,
                                                       .weight = span->k + 2 * key * span->size,
                                                       .x = span->q + q * span->size,
                                                       .out = products});
            for (int64_t r = 0; r < rows; r++)
                for (int64_t t = 0; t < m; t++) scores[q + t][key + r] = products[r * m + t] * span->scale;
        }
    }
}

/* Replaces the products of a query by exp(product - greatest), and writes greatest and sum. */
TARGET static inline void exponentiate(const kt_span *span, int64_t q, float *scores) {
    enum { VECTORS = KT_SUM_LANES / LANES };
    int64_t end = span->keys;
    for (; end % KT_SUM_LANES; end++) scores[end] = -INFINITY;
    floats greatest = set1_ps(-INFINITY), sum[VECTORS];
    for (int64_t i = 0; i < end; i += LANES) greatest = max_ps(greatest, loadu_ps(scores + i));
    float lanes[KT_SUM_LANES];
    storeu_ps(lanes, greatest);
    for (int i = 1; i < LANES; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    span->greatest[q * span->pitch] = lanes[0];
    greatest = set1_ps(lanes[0]);
    for (int v = 0; v < VECTORS; v++) sum[v] = setzero_ps();
    for (int64_t i = 0; i < end; i += KT_SUM_LANES)
        for (int v = 0; v < VECTORS; v++) {
            const floats weight = kt_exp(sub_ps(loadu_ps(scores + i + v * LANES), greatest));
            storeu_ps(scores + i + v * LANES, weight);
            sum[v] = add_ps(sum[v], weight);
        }
    for (int v = 0; v < VECTORS; v++) storeu_ps(lanes + v * LANES, sum[v]);
    span->sum[q * span->pitch] = kt_add_lanes(lanes);
}

/* Adds up a block of columns from `c` on, for some queries from `q` on. pairs (of vectors), queries: constants. */
__attribute__((always_inline)) TARGET static inline void
weigh_block(int pairs, int queries, const kt_span *span, const kt_scores scores, int64_t q, int64_t c) {
    enum { MOST_PAIRS = REGISTERS / 8, MOST_QUERIES = 2 };
    floats even[MOST_QUERIES][MOST_PAIRS], odd[MOST_QUERIES][MOST_PAIRS], weight[MOST_QUERIES];
    for (int i = 0; i < queries; i++)
        for (int p = 0; p < pairs; p++) even[i][p] = odd[i][p] = setzero_ps();
    for (int64_t key = 0; key < span->keys; key++) {
        const uint8_t *row = span->v + 2 * (key * span->value_size + c);
        for (int i = 0; i < queries; i++) weight[i] = set1_ps(scores[q + i][key]);
        for (int p = 0; p < pairs; p++) {
            const ints values = loadu_si(row + p * VECTOR_BYTES);
            const floats first = castsi_ps(slli_epi32(values, 16));
            const floats second = castsi_ps(and_si(values, set1_epi32(0xffff0000)));
            for (int i = 0; i < queries; i++) {
                even[i][p] = fmadd_ps(first, weight[i], even[i][p]);
                odd[i][p] = fmadd_ps(second, weight[i], odd[i][p]);
            }
        }
    }
    for (int i = 0; i < queries; i++)
        for (int p = 0; p < pairs; p++) {
            float first[LANES], second[LANES];
            float *out = span->out + (q + i) * span->pitch * span->value_size + c + 2 * p * LANES;
            storeu_ps(first, even[i][p]);
            storeu_ps(second, odd[i][p]);
            for (int l = 0; l < LANES; l++) out[2 * l] = first[l], out[2 * l + 1] = second[l];
        }
}

/* Weighs the values for some queries (a constant) from `q` on. */
__attribute__((always_inline)) TARGET static inline void weigh_values(int queries, const kt_span *span,
                                                                      const kt_scores scores, int64_t q) {
    enum { MOST = REGISTERS / 8, LEAST = KTQ_ROW_MULTIPLE / (2 * LANES) };
    int64_t c = 0;
    for (; c + MOST * 2 * LANES <= span->value_size; c += MOST * 2 * LANES)
        weigh_block(MOST, queries, span, scores, q, c);
    for (; c < span->value_size; c += LEAST * 2 * LANES) weigh_block(LEAST, queries, span, scores, q, c);
}

TARGET void KERNEL_OF(attend_span)(const kt_span *span) {
    kt_scores scores;
    score_keys(span, scores);
    for (int64_t q = 0; q < span->queries; q++) exponentiate(span, q, scores[q]);
    int64_t q = 0;
    for (; q + 2 <= span->queries; q += 2) weigh_values(2, span, scores, q);
    if (q < span->queries) weigh_values(1, span, scores, q);
}
