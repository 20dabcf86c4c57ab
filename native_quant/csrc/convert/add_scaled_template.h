/* Four vectors at a time; product and sum are rounded each, as in scalar C. */
TARGET void KERNEL_OF(add_scaled)(int64_t count, float factor, const float *from, float *to) {
    const floats scale = set1_ps(factor);
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int v = 0; v < 4 * LANES; v += LANES)
            storeu_ps(to + i + v, add_ps(loadu_ps(to + i + v), mul_ps(scale, loadu_ps(from + i + v))));
    for (; i < count; i++) to[i] += factor * from[i];
}
