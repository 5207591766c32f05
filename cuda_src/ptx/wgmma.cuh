// wgmma: a warpgroup multiplies 64 rows of A by B^T out of shared memory, float32 accumulators
// (sm_90a).
//
// The accumulator of kCols columns is float [2][kCols / 4] as in fragment.cuh: a thread's two rows,
// lane / 4 and lane / 4 + 8 of its warp's 16. The first product of a sum is a function of its own
// whose accumulators are outputs only, or the compiler would keep their old values alive. An
// operand in shared memory has its 16 columns of a step along a row; transposed, they are 16 rows.
#pragma once
#include "../base.cuh"

SKL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SKL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
SKL_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Accumulators in the order of the instruction, four column pairs (eight registers) at a time.
#define SKL_OUT(c, s, j) \
    c(s[0][2 * (j)]), c(s[0][2 * (j) + 1]), c(s[1][2 * (j)]), c(s[1][2 * (j) + 1])
#define SKL_OUT4(c, s, j) \
    SKL_OUT(c, s, j), SKL_OUT(c, s, (j) + 1), SKL_OUT(c, s, (j) + 2), SKL_OUT(c, s, (j) + 3)
#define SKL_OUT16(c, s, j) \
    SKL_OUT4(c, s, j), SKL_OUT4(c, s, (j) + 4), SKL_OUT4(c, s, (j) + 8), SKL_OUT4(c, s, (j) + 12)

// Their places in the instruction's text.
#define SKL_AT_0_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SKL_AT_0_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SKL_AT_16_24 "%16, %17, %18, %19, %20, %21, %22, %23"
#define SKL_AT_16_32 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SKL_AT_32_40 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SKL_AT_32_48 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SKL_AT_48_64 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SKL_AT_64_96                                                                        \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
    "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SKL_AT_96_128                                                                      \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
    "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
    "%124, %125, %126, %127"

template <class Element, int kCols, int kTransposeA = 0, int kTransposeB = 0>
struct Wgmma;
template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 16, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][4], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" SKL_AT_0_8
            "}, %8, %9, p, 1, 1, %10, %11;}"
            : SKL_OUT("=f", s, 0), SKL_OUT("=f", s, 1)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][4], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" SKL_AT_0_8
            "}, {%8, %9, %10, %11}, %12, p, 1, 1, %13;}"
            : SKL_OUT("=f", s, 0), SKL_OUT("=f", s, 1)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][4], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" SKL_AT_0_8
            "}, %8, %9, p, 1, 1, %10, %11;}"
            : SKL_OUT("+f", s, 0), SKL_OUT("+f", s, 1)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][4], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" SKL_AT_0_8
            "}, {%8, %9, %10, %11}, %12, p, 1, 1, %13;}"
            : SKL_OUT("+f", s, 0), SKL_OUT("+f", s, 1)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 16, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][4], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" SKL_AT_0_8
            "}, %8, %9, p, 1, 1, %10, %11;}"
            : SKL_OUT("=f", s, 0), SKL_OUT("=f", s, 1)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][4], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" SKL_AT_0_8
            "}, {%8, %9, %10, %11}, %12, p, 1, 1, %13;}"
            : SKL_OUT("=f", s, 0), SKL_OUT("=f", s, 1)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][4], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" SKL_AT_0_8
            "}, %8, %9, p, 1, 1, %10, %11;}"
            : SKL_OUT("+f", s, 0), SKL_OUT("+f", s, 1)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][4], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" SKL_AT_0_8
            "}, {%8, %9, %10, %11}, %12, p, 1, 1, %13;}"
            : SKL_OUT("+f", s, 0), SKL_OUT("+f", s, 1)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 32, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][8], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SKL_AT_0_16
            "}, %16, %17, p, 1, 1, %18, %19;}"
            : SKL_OUT4("=f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][8], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SKL_AT_0_16
            "}, {%16, %17, %18, %19}, %20, p, 1, 1, %21;}"
            : SKL_OUT4("=f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][8], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SKL_AT_0_16
            "}, %16, %17, p, 1, 1, %18, %19;}"
            : SKL_OUT4("+f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][8], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SKL_AT_0_16
            "}, {%16, %17, %18, %19}, %20, p, 1, 1, %21;}"
            : SKL_OUT4("+f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 32, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][8], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" SKL_AT_0_16
            "}, %16, %17, p, 1, 1, %18, %19;}"
            : SKL_OUT4("=f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][8], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" SKL_AT_0_16
            "}, {%16, %17, %18, %19}, %20, p, 1, 1, %21;}"
            : SKL_OUT4("=f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][8], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" SKL_AT_0_16
            "}, %16, %17, p, 1, 1, %18, %19;}"
            : SKL_OUT4("+f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][8], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" SKL_AT_0_16
            "}, {%16, %17, %18, %19}, %20, p, 1, 1, %21;}"
            : SKL_OUT4("+f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 48, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][12], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, %24, %25, p, 1, 1, %26, %27;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT("=f", s, 4), SKL_OUT("=f", s, 5)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][12], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, {%24, %25, %26, %27}, %28, p, 1, 1, %29;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT("=f", s, 4), SKL_OUT("=f", s, 5)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][12], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, %24, %25, p, 1, 1, %26, %27;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT("+f", s, 4), SKL_OUT("+f", s, 5)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][12], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, {%24, %25, %26, %27}, %28, p, 1, 1, %29;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT("+f", s, 4), SKL_OUT("+f", s, 5)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 48, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][12], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, %24, %25, p, 1, 1, %26, %27;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT("=f", s, 4), SKL_OUT("=f", s, 5)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][12], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, {%24, %25, %26, %27}, %28, p, 1, 1, %29;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT("=f", s, 4), SKL_OUT("=f", s, 5)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][12], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, %24, %25, p, 1, 1, %26, %27;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT("+f", s, 4), SKL_OUT("+f", s, 5)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][12], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_24
            "}, {%24, %25, %26, %27}, %28, p, 1, 1, %29;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT("+f", s, 4), SKL_OUT("+f", s, 5)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 64, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, %32, %33, p, 1, 1, %34, %35;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, %32, %33, p, 1, 1, %34, %35;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 64, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, %32, %33, p, 1, 1, %34, %35;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, %32, %33, p, 1, 1, %34, %35;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 80, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, %40, %41, p, 1, 1, %42, %43;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, {%40, %41, %42, %43}, %44, p, 1, 1, %45;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, %40, %41, p, 1, 1, %42, %43;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, {%40, %41, %42, %43}, %44, p, 1, 1, %45;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 80, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, %40, %41, p, 1, 1, %42, %43;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, {%40, %41, %42, %43}, %44, p, 1, 1, %45;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, %40, %41, p, 1, 1, %42, %43;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_40 "}, {%40, %41, %42, %43}, %44, p, 1, 1, %45;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 96, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][24], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, %48, %49, p, 1, 1, %50, %51;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][24], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, %53;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][24], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, %48, %49, p, 1, 1, %50, %51;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][24], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, %53;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 96, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][24], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, %48, %49, p, 1, 1, %50, %51;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][24], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, %53;}"
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][24], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, %48, %49, p, 1, 1, %50, %51;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][24], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, %53;}"
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 128, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, %64, %65, p, 1, 1, %66, %67;}"
            : SKL_OUT16("=f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;}"
            : SKL_OUT16("=f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, %64, %65, p, 1, 1, %66, %67;}"
            : SKL_OUT16("+f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;}"
            : SKL_OUT16("+f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 128, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, %64, %65, p, 1, 1, %66, %67;}"
            : SKL_OUT16("=f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;}"
            : SKL_OUT16("=f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, %64, %65, p, 1, 1, %66, %67;}"
            : SKL_OUT16("+f", s, 0)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;}"
            : SKL_OUT16("+f", s, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 192, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][48], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 "}, %96, %97, p, 1, 1, %98, %99;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT4("=f", s, 16), SKL_OUT4("=f", s, 20)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][48], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96
            "}, {%96, %97, %98, %99}, %100, p, 1, 1, %101;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT4("=f", s, 16), SKL_OUT4("=f", s, 20)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][48], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 "}, %96, %97, p, 1, 1, %98, %99;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT4("+f", s, 16), SKL_OUT4("+f", s, 20)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][48], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96
            "}, {%96, %97, %98, %99}, %100, p, 1, 1, %101;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT4("+f", s, 16), SKL_OUT4("+f", s, 20)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 192, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][48], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 "}, %96, %97, p, 1, 1, %98, %99;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT4("=f", s, 16), SKL_OUT4("=f", s, 20)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][48], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96
            "}, {%96, %97, %98, %99}, %100, p, 1, 1, %101;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT4("=f", s, 16), SKL_OUT4("=f", s, 20)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][48], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 "}, %96, %97, p, 1, 1, %98, %99;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT4("+f", s, 16), SKL_OUT4("+f", s, 20)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][48], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96
            "}, {%96, %97, %98, %99}, %100, p, 1, 1, %101;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT4("+f", s, 16), SKL_OUT4("+f", s, 20)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<bf16, 256, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][64], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, %128, %129, p, 1, 1, %130, %131;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT16("=f", s, 16)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][64], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, {%128, %129, %130, %131}, %132, p, 1, 1, %133;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT16("=f", s, 16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][64], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, %128, %129, p, 1, 1, %130, %131;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT16("+f", s, 16)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][64], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, {%128, %129, %130, %131}, %132, p, 1, 1, %133;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT16("+f", s, 16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

template <int kTransposeA, int kTransposeB>
struct Wgmma<fp16, 256, kTransposeA, kTransposeB> {
    SKL_DEVICE static void start(float (&s)[2][64], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, %128, %129, p, 1, 1, %130, %131;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT16("=f", s, 16)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void start(float (&s)[2][64], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, {%128, %129, %130, %131}, %132, p, 1, 1, %133;}"
            : SKL_OUT16("=f", s, 0), SKL_OUT16("=f", s, 16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][64], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, %128, %129, p, 1, 1, %130, %131;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT16("+f", s, 16)
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
    }
    SKL_DEVICE static void add(float (&s)[2][64], const uint32 (&a)[4], uint64 b) {
        static_assert(!kTransposeA, "registers are what they are");
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SKL_AT_0_16 ", " SKL_AT_16_32
            ", " SKL_AT_32_48 ", " SKL_AT_48_64 ", " SKL_AT_64_96 ", " SKL_AT_96_128
            "}, {%128, %129, %130, %131}, %132, p, 1, 1, %133;}"
            : SKL_OUT16("+f", s, 0), SKL_OUT16("+f", s, 16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));
    }
};

#undef SKL_AT_0_16
#undef SKL_AT_16_24
#undef SKL_AT_16_32
#undef SKL_AT_32_40
#undef SKL_AT_32_48
#undef SKL_AT_48_64
#undef SKL_AT_64_96
#undef SKL_AT_96_128
#undef SKL_OUT16
#undef SKL_OUT4
#undef SKL_OUT
