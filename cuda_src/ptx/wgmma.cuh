// wgmma: a warpgroup multiplies 64 rows of A by B^T out of shared memory, float32 accumulators
// (sm_90a).
//
// The accumulator of kCols columns is float [2][kCols / 4] as in fragment.cuh: a thread's two rows,
// lane / 4 and lane / 4 + 8 of its warp's 16. The first product of a sum is a function of its own
// whose accumulators are outputs only, or the compiler would keep their old values alive.
#pragma once
#include "../base.cuh"

SKL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SKL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
SKL_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Accumulators in the order of the instruction, four columns pairs (eight registers) at a time.
#define SKL_OUT(c, s, j) \
    c(s[0][2 * (j)]), c(s[0][2 * (j) + 1]), c(s[1][2 * (j)]), c(s[1][2 * (j) + 1])
#define SKL_OUT4(c, s, j) \
    SKL_OUT(c, s, j), SKL_OUT(c, s, (j) + 1), SKL_OUT(c, s, (j) + 2), SKL_OUT(c, s, (j) + 3)

template <class Element, int kCols>
struct Wgmma;

template <>
struct Wgmma<bf16, 64> {
    SKL_DEVICE static void start(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void start(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, "
            "1, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, "
            "1, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<fp16, 64> {
    SKL_DEVICE static void start(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void start(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, "
            "1, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][16], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][16], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, "
            "1, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<bf16, 80> {
    SKL_DEVICE static void start(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, %40, %41, p, 1, 1, 0, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void start(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, {%40, %41, %42, %43}, %44, p, 1, 1, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, %40, %41, p, 1, 1, 0, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, {%40, %41, %42, %43}, %44, p, 1, 1, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<fp16, 80> {
    SKL_DEVICE static void start(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, %40, %41, p, 1, 1, 0, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void start(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, {%40, %41, %42, %43}, %44, p, 1, 1, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT("=f", s, 8), SKL_OUT("=f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][20], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, %40, %41, p, 1, 1, 0, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][20], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39}, {%40, %41, %42, %43}, %44, p, 1, 1, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT("+f", s, 8), SKL_OUT("+f", s, 9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<bf16, 128> {
    SKL_DEVICE static void start(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8),
              SKL_OUT4("=f", s, 12)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void start(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, "
            "1, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8),
              SKL_OUT4("=f", s, 12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8),
              SKL_OUT4("+f", s, 12)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, "
            "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, "
            "1, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8),
              SKL_OUT4("+f", s, 12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<fp16, 128> {
    SKL_DEVICE static void start(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8),
              SKL_OUT4("=f", s, 12)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void start(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 0, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, "
            "1, 0;} "
            : SKL_OUT4("=f", s, 0), SKL_OUT4("=f", s, 4), SKL_OUT4("=f", s, 8),
              SKL_OUT4("=f", s, 12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][32], uint64 a, uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8),
              SKL_OUT4("+f", s, 12)
            : "l"(a), "l"(b));
    }
    SKL_DEVICE static void add(float (&s)[2][32], const uint32 (&a)[4], uint64 b) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, 1, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, "
            "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
            "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
            "%55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, "
            "1, 0;} "
            : SKL_OUT4("+f", s, 0), SKL_OUT4("+f", s, 4), SKL_OUT4("+f", s, 8),
              SKL_OUT4("+f", s, 12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

#undef SKL_OUT4
#undef SKL_OUT
