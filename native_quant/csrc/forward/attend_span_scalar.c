/* Attention to a span of keys, one element at a time. */
#include "vectors_scalar.h"

#include "attend_span_template.h"
