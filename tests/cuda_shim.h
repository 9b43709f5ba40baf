// What a kernel needs of CUDA to be compiled as C++ and run as loops, one thread after another.
// Right for kernels without shared memory, atomics and barriers.
#pragma once

#define __global__
#define __device__

struct Index {
    unsigned x;
};

static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

// The vector that a kernel moves at a time. Moves are counted: a load is one, a store another.
struct alignas(16) uint4 {
    unsigned x, y, z, w;

    uint4() = default;
    uint4(const uint4 &) = default;
    uint4 &operator=(const uint4 &other) {
        ++moves;
        x = other.x, y = other.y, z = other.z, w = other.w;
        return *this;
    }

    static inline long long moves = 0;
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned grid, unsigned block, Arguments... arguments) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {
            kernel(arguments...);
        }
    }
}
