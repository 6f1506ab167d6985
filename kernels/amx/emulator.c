// Emulates AMX on CPUs with AVX-512 and without the matrix unit, for tests. `scripts/amx-on-cpu` builds it, and
// LD_PRELOAD puts it into a program.
//
// A tile instruction raises SIGILL here; the handler computes what the instruction would and goes on behind it.
// The CPUID instructions of the program are replaced by ud2, so that the handler can add the bits of AMX. A seccomp
// filter traps the system call that requests the tile registers, which then succeeds.
//
// Semantics follow Intel's Software Developer's Manual, volume 2. A configuration that the manual forbids, or a tile
// used without one, ends the process with a message.

#define _GNU_SOURCE
#include <immintrin.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <link.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <cpuid.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

typedef union {
    uint8_t bytes[ROW_BYTES];
    int8_t signed_bytes[ROW_BYTES];
    int32_t integers[ROW_BYTES / 4];
    uint32_t words[ROW_BYTES / 4];
    float floats[ROW_BYTES / 4];
} __attribute__((aligned(64))) Row;

typedef struct {
    Row rows[ROWS];
} Tile;

// As ldtilecfg reads it.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Config;

// The registers of this thread.
static __thread __attribute__((tls_model("initial-exec"))) Config config;
static __thread __attribute__((tls_model("initial-exec"))) Tile tiles[TILES];

// The ud2 that stand for CPUID, by address.
enum { MAX_PATCHES = 256 };
static const uint8_t *patches[MAX_PATCHES];
static size_t patch_count;

static void fail(const char *why) {
    dprintf(2, "amx-on-cpu: %s\n", why);
    abort();
}

static void require(int holds, const char *why) {
    if (!holds) fail(why);
}

// --- Instructions --------------------------------------------------------------------------------------------------

static void load_config(const uint8_t *from) {
    memcpy(&config, from, sizeof config);
    memset(tiles, 0, sizeof tiles);
    require(config.palette <= 1, "ldtilecfg: the palette is not 0 or 1");
    for (int i = 0; i < 16; i++) {
        int is_used = config.row_bytes[i] != 0 || config.rows[i] != 0;
        require(!is_used || i < TILES, "ldtilecfg: there are eight registers");
        require(config.row_bytes[i] <= ROW_BYTES && config.rows[i] <= ROWS, "ldtilecfg: a register is too large");
        require((config.row_bytes[i] == 0) == (config.rows[i] == 0), "ldtilecfg: a register has no rows or no bytes");
    }
    for (size_t i = 0; i < sizeof config.reserved; i++) require(config.reserved[i] == 0, "ldtilecfg: reserved bytes");
}

static Tile *used(int tile) {
    require(config.palette == 1, "a tile is used without a configuration");
    require(tile < TILES && config.rows[tile] != 0, "a tile is used that the configuration leaves out");
    return &tiles[tile];
}

static void load(int tile, const uint8_t *from, int64_t stride) {
    Tile *to = used(tile);
    memset(to, 0, sizeof *to);
    for (int m = 0; m < config.rows[tile]; m++) memcpy(to->rows[m].bytes, from + m * stride, config.row_bytes[tile]);
}

static void store(int tile, uint8_t *to, int64_t stride) {
    const Tile *from = used(tile);
    for (int m = 0; m < config.rows[tile]; m++) memcpy(to + m * stride, from->rows[m].bytes, config.row_bytes[tile]);
}

static void check_product(int sum, int left, int right) {
    used(sum), used(left), used(right);
    require(sum != left && sum != right && left != right, "a product names a tile twice");
    require(config.rows[sum] == config.rows[left], "a product has sums of other rows than its left tile");
    require(config.row_bytes[sum] == config.row_bytes[right], "a product has sums of other columns than its right tile");
    require(config.row_bytes[left] == 4 * config.rows[right], "a product has a left and a right tile of other depths");
}

// tdpbssd, tdpbsud, tdpbusd, tdpbuud.
static void multiply_bytes(int sum, int left, int right, int left_is_signed, int right_is_signed) {
    check_product(sum, left, right);
    for (int m = 0; m < config.rows[sum]; m++) {
        Row *to = &tiles[sum].rows[m];
        for (int k = 0; k < config.rows[right]; k++) {
            for (int n = 0; n < config.row_bytes[sum] / 4; n++) {
                for (int i = 0; i < 4; i++) {
                    const Row *x = &tiles[left].rows[m], *w = &tiles[right].rows[k];
                    int a = left_is_signed ? x->signed_bytes[4 * k + i] : x->bytes[4 * k + i];
                    int b = right_is_signed ? w->signed_bytes[4 * n + i] : w->bytes[4 * n + i];
                    to->words[n] += (uint32_t)(a * b);
                }
            }
        }
    }
}

static __m512 even_halves(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }

static __m512 odd_halves(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
}

// tdpbf16ps: products of even and of odd columns are summed apart, then together, and then added. Denormals are zero.
static void multiply_bf16(int sum, int left, int right) {
    check_product(sum, left, right);
    _mm_setcsr(0x1f80 | 0x8040);
    for (int m = 0; m < config.rows[sum]; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < config.rows[right]; k++) {
            __m512i x = _mm512_set1_epi32(tiles[left].rows[m].integers[k]);
            __m512i w = _mm512_load_si512(&tiles[right].rows[k]);
            even = _mm512_fmadd_ps(even_halves(x), even_halves(w), even);
            odd = _mm512_fmadd_ps(odd_halves(x), odd_halves(w), odd);
        }
        __mmask16 columns = (__mmask16)((1u << config.row_bytes[sum] / 4) - 1);
        Row *to = &tiles[sum].rows[m];
        _mm512_mask_store_ps(to, columns, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(even, odd)));
    }
}

// --- Decoding ------------------------------------------------------------------------------------------------------

typedef struct {
    const uint8_t *base; // with the displacement
    int64_t index;       // scaled
    int length;          // bytes from the ModRM byte on
} Address;

static int64_t general(const ucontext_t *context, int number) {
    static const int places[16] = {
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
        REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
    };
    return context->uc_mcontext.gregs[places[number]];
}

static Address address(const ucontext_t *context, const uint8_t *modrm, int x, int b) {
    int mod = modrm[0] >> 6, rm = modrm[0] & 7, length = 1;
    int64_t base = 0, index = 0, displacement = 0;
    int is_absolute = mod == 0 && rm == 5;
    if (rm == 4) {
        int sib = modrm[length++], number = (sib >> 3 & 7) | x << 3;
        if (number != 4) index = general(context, number) << (sib >> 6);
        is_absolute = mod == 0 && (sib & 7) == 5;
        if (!is_absolute) base = general(context, (sib & 7) | b << 3);
    } else if (!is_absolute) {
        base = general(context, rm | b << 3);
    }
    if (mod == 1) {
        displacement = (int8_t)modrm[length++];
    } else if (mod == 2 || is_absolute) {
        int32_t wide;
        memcpy(&wide, modrm + length, 4);
        displacement = wide;
        length += 4;
        if (is_absolute && rm == 5) base = (int64_t)(modrm + length);
    }
    return (Address){(const uint8_t *)(base + displacement), index, length};
}

enum Prefix { NONE, P66, PF3, PF2 };

// Computes the instruction at `at` if it is one of AMX; returns its length, or 0.
static int compute(const ucontext_t *context, const uint8_t *at) {
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 0x84) != 0) return 0;
    int r = !(at[1] & 0x80), x = !(at[1] & 0x40), b = !(at[1] & 0x20), right = ~at[2] >> 3 & 15;
    enum Prefix prefix = at[2] & 3;
    const uint8_t *modrm = at + 4;
    int is_memory = modrm[0] >> 6 != 3, reg = (modrm[0] >> 3 & 7) | r << 3, left = (modrm[0] & 7) | b << 3;
    switch (at[3]) {
    case 0x49:
        if (prefix == NONE && is_memory) {
            Address from = address(context, modrm, x, b);
            load_config(from.base + from.index);
            return 4 + from.length;
        }
        if (prefix == NONE && modrm[0] == 0xc0) {
            memset(&config, 0, sizeof config);
            return 5;
        }
        if (prefix == PF2 && !is_memory) {
            memset(used(reg), 0, sizeof(Tile));
            return 5;
        }
        return 0;
    case 0x4b: {
        if (!is_memory) return 0;
        Address place = address(context, modrm, x, b);
        if (prefix == PF3) store(reg, (uint8_t *)place.base, place.index);
        else if (prefix != NONE) load(reg, place.base, place.index);
        return prefix == NONE ? 0 : 4 + place.length;
    }
    case 0x5e:
        if (is_memory) return 0;
        multiply_bytes(reg, left, right, prefix == PF2 || prefix == PF3, prefix == PF2 || prefix == P66);
        return 5;
    case 0x5c:
        if (is_memory || prefix != PF3) return 0;
        multiply_bf16(reg, left, right);
        return 5;
    default: return 0;
    }
}

// --- What the program asks -----------------------------------------------------------------------------------------

static int is_patch(const uint8_t *at) {
    for (size_t i = 0; i < patch_count; i++) {
        if (patches[i] == at) return 1;
    }
    return 0;
}

static void answer_cpuid(greg_t *registers) {
    unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX], a, b, c, d;
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) d |= 1u << 22 | 1u << 24 | 1u << 25; // bf16, tiles, bytes
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
}

static void on_illegal(int signal_number, siginfo_t *info, void *opaque) {
    (void)signal_number, (void)info;
    ucontext_t *context = opaque;
    greg_t *registers = context->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    int length = 2;
    if (is_patch(at)) answer_cpuid(registers);
    else length = compute(context, at);
    if (length == 0) {
        dprintf(2, "amx-on-cpu: an illegal instruction that is none of AMX: %02x %02x %02x %02x %02x\n", at[0], at[1],
                at[2], at[3], at[4]);
        abort();
    }
    registers[REG_RIP] += length;
}

static void on_system_call(int signal_number, siginfo_t *info, void *opaque) {
    (void)signal_number, (void)info;
    ((ucontext_t *)opaque)->uc_mcontext.gregs[REG_RAX] = 0;
}

// CPUID as compilers of Rust write it: `mov r, rbx; cpuid; xchg r, rbx`.
static int is_cpuid(const uint8_t *at) {
    return (at[0] & 0xf8) == 0x48 && at[1] == 0x89 && at[3] == 0x0f && at[4] == 0xa2 && (at[5] & 0xf8) == 0x48 &&
           at[6] == 0x87;
}

static int patch(struct dl_phdr_info *object, size_t size, void *unused) {
    (void)size, (void)unused;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        uint8_t *from = (uint8_t *)(object->dlpi_addr + part->p_vaddr), *end = from + part->p_memsz;
        uint8_t *page = (uint8_t *)((uintptr_t)from & ~(uintptr_t)4095);
        require(mprotect(page, (size_t)(end - page), PROT_READ | PROT_WRITE | PROT_EXEC) == 0, "mprotect failed");
        for (uint8_t *at = from; at + 8 <= end; at++) {
            if (!is_cpuid(at)) continue;
            require(patch_count < MAX_PATCHES, "too many CPUID instructions");
            at[4] = 0x0b; // ud2
            patches[patch_count++] = at + 3;
        }
        require(mprotect(page, (size_t)(end - page), PROT_READ | PROT_EXEC) == 0, "mprotect failed");
    }
    return 1; // the program is the first object
}

static void trap_requests(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x1023, 0, 1), // ARCH_REQ_XCOMP_PERM
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    require(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS failed");
    require(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "PR_SET_SECCOMP failed");
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER};
    require(sigaction(SIGILL, &action, NULL) == 0, "sigaction failed");
    action.sa_sigaction = on_system_call;
    require(sigaction(SIGSYS, &action, NULL) == 0, "sigaction failed");
    dl_iterate_phdr(patch, NULL);
    trap_requests();
}
