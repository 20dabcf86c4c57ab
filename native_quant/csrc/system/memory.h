/* Memory of the process. */
#ifndef KT_MEMORY_H
#define KT_MEMORY_H

#include <stdint.h>

/* Starts to read the pages of a mapped file that are not in memory, and returns. */
void kt_read_ahead(const void *address, int64_t bytes);

#endif
