/* A multiple of one array added to another: the definition, a value at a time. */
#include "kernels.h"

void kt_add_scaled_scalar(int64_t count, float factor, const float *from, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] += factor * from[i];
}
