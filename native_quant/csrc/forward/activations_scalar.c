/* The activations of experts, one element at a time. */
#include "vectors_scalar.h"

#include "activations_template.h"
