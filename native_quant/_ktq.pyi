"""The cffi module for csrc/ktq.h. Integers are C's; pointers come from `ffi.from_buffer` or `ffi.new`."""

from typing import Any

ffi: Any  # types-cffi does not know the fields of a struct

class Lib:
    KTQ_OK: int
    KTQ_EINVAL: int
    KTQ_ESHAPE: int
    KTQ_EISA: int
    KTQ_ENONFINITE: int
    KTQ_ESYSTEM: int
    KTQ_ENOMEM: int
    KTQ_ECLOSED: int
    KTQ_EFORK: int
    KTQ_ERANGE: int
    KTQ_MOST_PARTS: int
    KTQ_MOST_TOPK: int
    KTQ_MOST_COLUMNS: int
    KTQ_POOL_THREADS: int
    KTQ_CPU_BYTES: int
    KTQ_BF16: int
    KTQ_FP16: int
    KTQ_F32: int
    KTQ_FP8_E4M3: int
    KTQ_INT4: int
    KTQ_INT8: int
    KTQ_FP4_E2M1: int
    KTQ_INT8_SIGNED: int
    KTQ_INT4_AWQ: int
    KTQ_Q4_0: int
    KTQ_Q8_0: int
    KTQ_Q4_K: int
    KTQ_Q5_K: int
    KTQ_Q6_K: int
    KTQ_GGML_MXFP4: int
    KTQ_LIBRARY: int
    KTQ_FLOAT32: int
    KTQ_GPTQ_COLUMNS: int
    KTQ_BF16_MULTIPLE: int
    KTQ_PANELS: int
    KTQ_ROWS: int
    KTQ_BLOCKS: int
    KTQ_MXFP4_MULTIPLE: int
    KTQ_FP8_MULTIPLE: int
    KTQ_NODE_WORDS: int
    KTQ_FORMAT_AMXINT4: int
    KTQ_FORMAT_AMXINT8: int
    KTQ_FORMAT_MXFP4: int
    KTQ_FORMAT_FP8: int
    KTQ_FORMAT_BF16: int
    KTQ_FORMAT_FP8_PERCHANNEL: int
    KTQ_FORMAT_MXFP8: int
    KTQ_FORMAT_NVFP4: int
    KTQ_FORMAT_RAWINT4: int
    KTQ_FORMAT_GPTQ_INT4: int
    KTQ_FORMAT_GPTQ_INT4_64: int
    KTQ_FORMAT_GPTQ_INT4_32: int
    KTQ_FORMAT_Q4_0: int
    KTQ_FORMAT_Q8_0: int
    KTQ_FORMAT_Q4_K: int
    KTQ_FORMAT_Q5_K: int
    KTQ_FORMAT_Q6_K: int
    KTQ_NVFP4_HEADER: int

    def ktq_block_rows(self, bits: int) -> int: ...
    def ktq_tile_columns(self, bits: int) -> int: ...
    def ktq_quantize_pack(
        self, bits: int, n: int, k: int, source: Any, scratch: Any, weight: Any, scale: Any, bad_row: Any
    ) -> int: ...
    def ktq_quantize_plain(
        self, bits: int, n: int, k: int, source: Any, scratch: Any, weight: Any, scale: Any, bad_row: Any
    ) -> int: ...
    def ktq_pack_bf16(
        self, order: int, n: int, k: int, source: ffi.CData, scratch: ffi.CData, codes: ffi.CData, bad_row: ffi.CData
    ) -> int: ...
    def ktq_mxfp4_rows(self, n: int, k: int, codes: Any, exponents: Any, rows: Any, row_exponents: Any) -> int: ...
    def ktq_pack_mxfp4(
        self,
        n: int,
        k: int,
        source: ffi.CData,
        scratch: ffi.CData,
        codes: ffi.CData,
        exponents: ffi.CData,
        bad_row: ffi.CData,
    ) -> int: ...
    def ktq_reorder_ggml(
        self, kind: int, n: int, k: int, rows: Any, row_stride: int, codes: Any, scales: Any, bad_row: Any
    ) -> int: ...
    def ktq_reorder_fp8(self, n: int, k: int, rows: Any, row_stride: int, codes: Any, bad_row: Any) -> int: ...
    def ktq_pack_fp8(
        self,
        order: int,
        n: int,
        k: int,
        source: ffi.CData,
        scratch: ffi.CData,
        codes: ffi.CData,
        scales: ffi.CData,
        bad_row: ffi.CData,
    ) -> int: ...
    def ktq_pack_codes(
        self, bits: int, n: int, k: int, codes: Any, row_stride: int, weight: Any, bad_row: Any
    ) -> int: ...
    def ktq_search_scales(
        self,
        bits: int,
        n: int,
        k: int,
        rows: Any,
        row_stride: int,
        importance: Any,
        scratch: Any,
        codes: Any,
        scale: Any,
        bad_row: Any,
    ) -> int: ...
    def ktq_quantize_groups(
        self,
        bits: int,
        group: int,
        rounding: int,
        n: int,
        k: int,
        source: Any,
        scratch: Any,
        packed: Any,
        scale: Any,
        bad_row: Any,
    ) -> int: ...
    def ktq_gptq_block(
        self,
        least: int,
        most: int,
        precision: int,
        kind: int,
        n: int,
        width: int,
        inverse: Any,
        scale: Any,
        weight: Any,
        value: Any,
        error: Any,
    ) -> int: ...
    def ktq_decode(self, n: int, k: int, source: Any, out: Any) -> int: ...
    def ktq_dequantize(self, bits: int, n: int, k: int, weight: Any, scale: Any, out: Any) -> int: ...
    def ktq_error_sums(
        self, bits: int, n: int, k: int, source: Any, scratch: Any, weight: Any, scale: Any, sums: Any
    ) -> int: ...
    def ktq_pool_new(self, groups: int, threads: Any, cpus: Any, pool: Any) -> int: ...
    def ktq_pool_close(self, pool: Any) -> None: ...
    def ktq_pool_free(self, pool: Any) -> None: ...
    def ktq_forward(self, pool: Any, moe: Any, call: Any) -> int: ...
    def ktq_weight_bytes(self, format: int, n: int, k: int, codes: Any, scales: Any) -> int: ...
    def ktq_job_new(self, pool: Any, moe: Any, call: Any, job: Any) -> int: ...
    def ktq_job_submit(self, job: Any) -> None: ...
    def ktq_job_wait(self, job: Any) -> None: ...
    def ktq_job_result(self, job: Any) -> int: ...
    def ktq_job_free(self, job: Any) -> None: ...
    def ktq_place_memory(self, address: Any, length: int, count: int, nodes: Any) -> int: ...
    def ktq_gather_memory(self, address: Any, length: int, node: int) -> int: ...
    def ktq_memory_policy(self, mode: Any, nodes: Any) -> int: ...
    def ktq_read(self, streams: int, bytes: int, start: Any, sum: Any) -> int: ...
    def ktq_isa_count(self) -> int: ...
    def ktq_isa_name(self, isa: int) -> Any: ...
    def ktq_isa_available(self, isa: int) -> int: ...
    def ktq_isa(self) -> int: ...
    def ktq_set_isa(self, isa: int) -> int: ...
    def ktq_kernel_isa(self, row: int) -> int: ...
    def ktq_kernels(self) -> Any: ...
    def ktq_kernel_family(self, row: int) -> Any: ...
    def ktq_guard_sigbus(self, sentence: bytes, code: int) -> int: ...
    def ktq_register_mapping(self, address: Any, length: int, name: bytes, may_lose: int) -> int: ...
    def ktq_lost(self, address: Any, length: int) -> Any: ...
    def ktq_any_lost(self) -> int: ...
    def ktq_unregister_mapping(self, address: Any) -> int: ...
    def ktq_strerror(self, error: int) -> Any: ...

lib: Lib
