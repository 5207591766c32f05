// Words every file shares: fixed-width integers, the element types, and what lets plain
// arithmetic also compile with a host C++ compiler. No CUDA header is included anywhere in this
// folder: NVRTC needs none, and a user neither.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

// Tags of the element types. Values travel as raw bits; ptx/mma.cuh and fragment.cuh know what to
// do with them.
struct bf16 {};
struct fp16 {};
// Elements of 4 bytes, in two ways of multiplying them: as sums of bfloat16, to the accuracy of
// float32, and rounded to tf32.
struct fp32 {};
struct tf32 {};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

// Layouts count in units of 16 bits; so many make an element.
template <class Element>
inline constexpr int kUnits = is_same<Element, fp32> || is_same<Element, tf32> ? 2 : 1;

template <bool kCondition, class A, class B>
struct Choose {
    using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using Type = B;
};

#if defined(__CUDACC__)
#define SKL_DEVICE __device__ __forceinline__
#define SKL_HOST_DEVICE __host__ __device__ __forceinline__
#define SKL_UNROLL _Pragma("unroll")
#define SKL_NO_UNROLL _Pragma("unroll 1")
#else  // the host build of the tests
#include <cmath>
using std::ceil, std::copysign, std::exp, std::exp2, std::fabs, std::fma, std::fmax, std::log1p,
    std::log2, std::nearbyint;
#define SKL_HOST_DEVICE inline
#define SKL_UNROLL
#define SKL_NO_UNROLL
#endif

template <class T>
SKL_HOST_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}
template <class T>
SKL_HOST_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}
SKL_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// 2^x by the special function unit; results under 2^-126 become zero.
SKL_HOST_DEVICE float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2(x);
#endif
}

// Holds a value at this point of the program: the compiler may move neither its computation nor its
// uses across.
SKL_HOST_DEVICE void pin(float& x) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+f"(x));
#else
    (void)x;
#endif
}
template <class Integer>
SKL_HOST_DEVICE void pin(Integer& x) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(x));
#else
    (void)x;
#endif
}
