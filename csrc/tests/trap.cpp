// The shipped machine code of the tile kernels, run without tiles.
//
// Links the very object that goes into the library. Its tile instructions are illegal on this
// processor; the handler of that signal decodes and emulates them, all else runs as it is. What this
// sees and emulation in the source does not: what the compiler made of the configuration, of
// addresses and strides, of the order of stores and tile loads. Needs AVX2. On a processor with tiles
// they are illegal, too, as long as the process has not asked the system for them; a second pass
// does, and compares with the hardware.
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <random>

#include "bf16.h"
#include "bf16_model.h"
#include "processor.h"
#include "tiles.h"

namespace {

using namespace phloem;
using namespace phloem::PHLOEM_NS;

long trapped = 0;

// A decoded VEX instruction of the 0F 38 map.
struct Instruction {
    int opcode, prefix, vvvv, reg, rm, length;
    bool memory;
    char *base;       // address without the index
    int64_t stride;   // index << scale
};

int64_t general(ucontext_t *context, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[order[number]];
}

[[noreturn]] void unknown(const uint8_t *at) {
    fprintf(stderr, "illegal, and no tile instruction:");
    for (int i = 0; i < 10; ++i) fprintf(stderr, " %02x", at[i]);
    fprintf(stderr, "\n");
    abort();
}

Instruction decode(ucontext_t *context, const uint8_t *at) {
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 4)) unknown(at);
    Instruction in{};
    const int x_bit = at[1] & 0x40 ? 0 : 8, b_bit = at[1] & 0x20 ? 0 : 8;
    in.prefix = at[2] & 3;
    in.vvvv = ~(at[2] >> 3) & 15;
    in.opcode = at[3];
    const int mod = at[4] >> 6;
    in.reg = at[4] >> 3 & 7;
    in.rm = at[4] & 7;
    in.length = 5;
    in.memory = mod != 3;
    if (!in.memory) return in;
    bool no_base = mod == 0 && in.rm == 5;  // relative to the next instruction
    if (in.rm == 4) {
        const uint8_t sib = at[in.length++];
        const int index = (sib >> 3 & 7) + x_bit;
        if (index != 4) in.stride = general(context, index) << (sib >> 6);
        if (mod == 0 && (sib & 7) == 5) unknown(at);
        in.base = (char *)general(context, (sib & 7) + b_bit);
    } else if (!no_base) {
        in.base = (char *)general(context, in.rm + b_bit);
    }
    int32_t displacement = 0;
    if (mod == 1) displacement = (int8_t)at[in.length++];
    if (mod == 2 || no_base) {
        memcpy(&displacement, at + in.length, 4);
        in.length += 4;
    }
    if (no_base) in.base = (char *)at + in.length;
    in.base += displacement;
    return in;
}

void emulate(const Instruction &in, const uint8_t *at) {
    constexpr int kNone = 0, k66 = 1, kF3 = 2, kF2 = 3;
    if (in.opcode == 0x49 && in.prefix == kNone && in.memory && in.reg == 0) {
        emulated_begin(*(const TileConfig *)in.base);
    } else if (in.opcode == 0x49 && in.prefix == kNone && at[4] == 0xc0) {
        emulated_end();
    } else if (in.opcode == 0x49 && in.prefix == kF2 && !in.memory && in.rm == 0) {
        emulated_zero(in.reg);
    } else if (in.opcode == 0x4b && (in.prefix == kF2 || in.prefix == k66) && in.memory) {
        emulated_load(in.reg, in.base, in.stride);
    } else if (in.opcode == 0x4b && in.prefix == kF3 && in.memory) {
        emulated_store(in.reg, in.base, in.stride);
    } else if (in.opcode == 0x5c && in.prefix == kF3 && !in.memory) {
        emulated_dot(in.reg, in.rm, in.vvvv);
    } else {
        unknown(at);
    }
}

// Where there are tiles, ldtilecfg and tilerelease are legal even to those who may not use them: what
// they have done stands in the interrupted state (component 17 of XSAVE).
void follow_configuration(const ucontext_t *context) {
    unsigned size, offset, c, d;
    if (!cpu_features().amx || !__get_cpuid_count(13, 17, &size, &offset, &c, &d)) return;
    const char *state = (const char *)context->uc_mcontext.fpregs;
    uint64_t present;
    memcpy(&present, state + 512, 8);
    TileConfig config{};
    if (present >> 17 & 1) memcpy(&config, state + offset, sizeof config);
    EmulatedTiles &e = emulated();
    if (e.configured && memcmp(&config, &e.config, sizeof config) == 0) return;
    if (e.configured) emulated_end();
    if (config.palette) emulated_begin(config);
}

void on_illegal(int, siginfo_t *, void *raw) {
    ucontext_t *context = (ucontext_t *)raw;
    follow_configuration(context);
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    const Instruction in = decode(context, at);
    emulate(in, at);
    context->uc_mcontext.gregs[REG_RIP] += in.length;
    ++trapped;
}

std::mt19937 rng(11);

float normal() { return std::normal_distribution<float>()(rng); }

// (m, k) by (n, k), all panels in one task. Returns the number of outputs that differ.
int check(int64_t m, int64_t n, int64_t k, bool bias, bool exact) {
    std::vector<model::Row> x(m, model::Row(k)), w(n, model::Row(k));
    for (auto *rows : {&x, &w})
        for (model::Row &row : *rows)
            for (uint16_t &v : row) v = model::rounded(normal());
    const int64_t padded = (k + 31) / 32 * 32, panels = (n + 15) / 16;
    std::vector<uint16_t> tiles((m + 15) / 16 * 16 * padded), packed(panels * padded * 16);
    std::vector<float> y(m * n), shift(n);
    for (float &s : shift) s = bias ? normal() : 0;
    std::vector<float> wide(m * k);
    for (int64_t i = 0; i < m * k; ++i) wide[i] = model::widened(x[i / k][i % k]);
    kKernelsAvx2.round_tiles(wide.data(), PHLOEM_F32, k, m, k, tiles.data());
    for (int64_t j = 0; j < n; ++j)
        for (int64_t c = 0; c < k; ++c)
            packed[j / 16 * padded * 16 + (c / 2 * 16 + j % 16) * 2 + c % 2] = w[j][c];
    const phloem_weight weight{packed.data(), bias ? shift.data() : nullptr, n, k, PHLOEM_W_BF16, 0};
    GemmTask task{};
    task.w = &weight;
    task.y = y.data();
    task.m = m;
    task.y_stride = n;
    task.panel1 = panels;
    kBf16Amx.gemm(kKernelsAvx2, task, tiles.data(), 0);
    int wrong = 0;
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            const float want = model::tiles(x[i], w[j]) + shift[j], got = y[i * n + j];
            wrong += exact ? got != want : !(std::fabs(got - want) < 1e-3f * (float)k);
        }
    if (wrong) printf("FAILED: %ld x %ld x %ld: %d differ\n", (long)m, (long)n, (long)k, wrong);
    return wrong;
}

int check_all(bool exact) {
    int wrong = 0;
    for (int m : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 64, 75})
        for (int n : {16, 17, 50, 64, 100, 128})
            for (int k : {1, 37, 64, 100, 1190}) wrong += check(m, n, k, m % 2, exact);
    return wrong;
}

}  // namespace

int main() {
    if (!cpu_features().avx2) return printf("no AVX2 here: not run\nall right\n"), 0;
    struct sigaction action {};
    action.sa_sigaction = on_illegal;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
    int wrong = check_all(true);
    printf("%ld instructions emulated\n", trapped);
    if (trapped == 0) wrong = printf("FAILED: nothing was trapped\n");
    if (cpu_features().amx && tiles_granted()) {
        const long before = trapped;
        wrong += check_all(false);
        if (trapped != before) wrong = printf("FAILED: tiles were granted and are illegal\n");
        printf("tiles of the hardware compared\n");
    }
    printf(wrong ? "wrong\n" : "all right\n");
    return wrong != 0;
}
