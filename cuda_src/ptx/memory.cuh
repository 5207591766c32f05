// Plain accesses to shared and global memory whose form matters.
#pragma once
#include "../base.cuh"

SKL_DEVICE uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

SKL_DEVICE void store_shared_128(uint32 address, const uint32 (&v)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

SKL_DEVICE void load_shared_64(uint32 (&v)[2], uint32 address) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "r"(address)
                 : "memory");
}

SKL_DEVICE void store_shared_32(uint32 address, uint32 v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Adds four neighbouring floats to global memory. Whoever needs a fixed order among blocks has to
// wait for those before it.
SKL_DEVICE void reduce_add_global(float* address, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
#else
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(a) : "memory");
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address + 1), "f"(b) : "memory");
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address + 2), "f"(c) : "memory");
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address + 3), "f"(d) : "memory");
#endif
}

// A count that others wait for. Whoever reads what was added sees all that this thread, and those
// that it has waited for, wrote before.
SKL_DEVICE void add_release(uint32* address, uint32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

SKL_DEVICE uint32 load_acquire(const uint32* address) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
