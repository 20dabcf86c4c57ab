/* AMX in software, on a CPU with or without it: to be preloaded. The CPU refuses a tile instruction with SIGILL; the
 * handler reads the instruction, computes on eight arrays what it means (Intel SDM volume 2), and goes on behind it. So
 * the machine code under test is the one that ships, but for a ud2 before ldtilecfg and tilerelease (tiles.h): a CPU
 * with AMX would carry these two out. It never does, so its own tiles stay unconfigured and it refuses all the others
 * (SDM volume 2, class AMX-E1 and the following). What would fault, and a kernel that leaves its tiles configured, ends
 * the process with a sentence. */
#define _GNU_SOURCE /* REG_RAX .. */
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

typedef union {
    int8_t bytes[16][64];
    int32_t words[16][16];
    uint16_t halves[16][32];
    float floats[16][16];
} tile;

static __thread tile_config config; /* palette 0: none */
static __thread tile tiles[8];

static void check(int is_right, const char *sentence) {
    if (is_right) return;
    dprintf(2, "amx_trapped: %s\n", sentence);
    _exit(70);
}

static tile *in_use(int number) {
    check(number < 8 && config.palette == 1 && config.rows[number] > 0, "a tile is used that is not configured");
    return &tiles[number];
}

static void configure(const tile_config *new) {
    static const uint8_t zeros[14];
    check(config.palette == 0, "tiles are configured that nobody released");
    check(new->palette == 1 && new->start_row == 0 && !memcmp(new->reserved, zeros, sizeof zeros),
          "a configuration is malformed");
    for (int t = 0; t < 16; t++) {
        check(new->rows[t] <= (t < 8 ? 16 : 0) && new->row_bytes[t] <= (t < 8 ? 64 : 0),
              "a configured tile is too large");
        check(!new->rows[t] == !new->row_bytes[t], "a configured tile has rows or columns only");
    }
    config = *new;
    memset(tiles, 0, sizeof tiles);
}

static void load(int number, const char *from, int64_t stride) {
    memset(in_use(number), 0, sizeof(tile));
    for (int r = 0; r < config.rows[number]; r++)
        memcpy(tiles[number].bytes[r], from + r * stride, config.row_bytes[number]);
}

static void store(int number, char *to, int64_t stride) {
    in_use(number);
    for (int r = 0; r < config.rows[number]; r++)
        memcpy(to + r * stride, tiles[number].bytes[r], config.row_bytes[number]);
}

static void check_product(int c, int a, int b) {
    check(c != a && c != b && a != b, "tiles of a product are not three");
    check(config.rows[c] == config.rows[a] && config.row_bytes[c] == config.row_bytes[b] &&
              config.row_bytes[a] == 4 * config.rows[b],
          "tiles of a product do not fit");
}

static void multiply(tile *sum, const tile *left, const tile *right, int rows) {
    int32_t column[64][16]; /* of the right one; what lies outside of a tile is 0 */
    for (int j = 0; j < 64; j++)
        for (int n = 0; n < 16; n++) column[j][n] = right->bytes[j / 4][4 * n + j % 4];
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < 64; j++)
            for (int n = 0; n < 16; n++) sum->words[m][n] += left->bytes[m][j] * column[j][n];
}

/* BF16 in float32. */
static float widened(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* TDPBF16PS as Intel SDM volume 2 ("Operation") has it: for each row of the left tile two sums from 0, of the products
 * of the first and of the second numbers of its pairs, pair after pair; each product is added in one rounding (FMA).
 * The second sum is added to the first, and that to the tile: two more roundings. Rounds to nearest even; subnormals
 * are 0, read or written, whatever MXCSR says: add_products sets it so, and the return from the handler puts it back. */
__attribute__((noinline)) static void multiply_bf16(tile *sum, const tile *left, const tile *right, int rows,
                                                    int pairs) {
    float of_pair[16][2][16];
    for (int k = 0; k < pairs; k++)
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < 2; i++) of_pair[k][i][n] = widened(right->halves[k][2 * n + i]);
    for (int m = 0; m < rows; m++) {
        float sums[2][16] = {{0}};
        for (int k = 0; k < pairs; k++)
            for (int i = 0; i < 2; i++) {
                float number = widened(left->halves[m][2 * k + i]);
                for (int n = 0; n < 16; n++) sums[i][n] = __builtin_fmaf(number, of_pair[k][i][n], sums[i][n]);
            }
        for (int n = 0; n < 16; n++) sum->floats[m][n] += sums[0][n] + sums[1][n];
    }
}

static void add_products(int is_bf16, int c, int a, int b) {
    enum { MXCSR_OF_AMX = 0x9fc0 }; /* to nearest even, FTZ and DAZ, no exceptions */
    tile *sum = in_use(c);
    const tile *left = in_use(a), *right = in_use(b);
    check_product(c, a, b);
    _mm_setcsr(MXCSR_OF_AMX);
    if (is_bf16) multiply_bf16(sum, left, right, config.rows[c], config.rows[b]);
    else multiply(sum, left, right, config.rows[c]);
}

/* Registers by their number in an instruction. */
static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* The address in a memory operand: of its first row, and the index, which is the stride. at: behind the ModRM byte.
   Returns the instruction's end. */
static const uint8_t *operand(const uint8_t *at, int modrm, int x, int b, const greg_t *values, uint64_t *address,
                              int64_t *stride) {
    int base = modrm & 7, mod = modrm >> 6, index = 4, scale = 0;
    if (base == 4) {
        base = *at & 7;
        index = (*at >> 3 & 7) | x << 3;
        scale = *at++ >> 6;
    }
    check(mod != 0 || base != 5, "an address relative to the instruction");
    *address = (uint64_t)values[registers[base | b << 3]];
    *stride = index == 4 ? 0 : (int64_t)((uint64_t)values[registers[index]] << scale);
    int32_t distance = 0;
    if (mod == 1) distance = (int8_t)*at++;
    if (mod == 2) {
        memcpy(&distance, at, 4);
        at += 4;
    }
    *address += (uint64_t)(int64_t)distance;
    return at;
}

/* C4, then R X B (inverted) and the opcode map, then W, vvvv (inverted), L and the prefix; opcode; ModRM. Returns the
   instruction's end, NULL if it is not one of ours. */
static const uint8_t *carry_out(const uint8_t *at, const greg_t *values) {
    enum { NONE, P66, PF3, PF2 };
    static const uint8_t ud2[] = {0x0f, 0x0b};
    int is_marked = !memcmp(at, ud2, sizeof ud2);
    if (is_marked) at += sizeof ud2;
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || (at[2] & 0x84) != 0) return NULL;
    int x = !(at[1] & 0x40), b = !(at[1] & 0x20), v = ~at[2] >> 3 & 15, prefix = at[2] & 3, opcode = at[3],
        modrm = at[4];
    int is_memory = modrm < 0xc0, number = modrm >> 3 & 7;
    uint64_t address = 0;
    int64_t stride = 0;
    int is_configuration = opcode == 0x49 && prefix == NONE;
    check(is_marked || !is_configuration,
          "tiles are configured or released without a ud2 before: a CPU with AMX would do it unseen");
    if (is_marked && !is_configuration) return NULL;
    const uint8_t *end = is_memory ? operand(at + 5, modrm, x, b, values, &address, &stride) : at + 5;
    if (opcode == 0x49 && prefix == NONE && is_memory) configure((const tile_config *)address);
    else if (opcode == 0x49 && prefix == NONE && modrm == 0xc0) memset(&config, 0, sizeof config);
    else if (opcode == 0x49 && prefix == PF2 && !is_memory) memset(in_use(number), 0, sizeof(tile));
    else if (opcode == 0x4b && (prefix == PF2 || prefix == P66) && is_memory) /* tileloaddt1, too */
        load(number, (const char *)address, stride);
    else if (opcode == 0x4b && prefix == PF3 && is_memory) store(number, (char *)address, stride);
    else if (opcode == 0x5e && prefix == PF2 && !is_memory) add_products(0, number, modrm & 7, v);
    else if (opcode == 0x5c && prefix == PF3 && !is_memory) add_products(1, number, modrm & 7, v);
    else return NULL;
    return end;
}

static void on_illegal_instruction(int signal_number, siginfo_t *information, void *context) {
    (void)information;
    greg_t *values = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *end = carry_out((const uint8_t *)values[REG_RIP], values);
    if (end) values[REG_RIP] = (greg_t)end;
    else signal(signal_number, SIG_DFL); /* it comes again */
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &action, NULL);
}
