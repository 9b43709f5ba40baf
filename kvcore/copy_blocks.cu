// Copies blocks between the planes of two pools: every plane and every pair in one launch.
//
// kvcore/copy_kernel.py describes the arguments and reads this text at run time. It uses no
// atomics, no shared memory and no barrier, so any C++ compiler can run it as loops.

// 64 bytes, as copy_kernel.py lays them out.
struct Plane {
    const char *source;  // of block 0
    char *destination;
    long long source_stride;  // from block to block
    long long destination_stride;
    long long source_pitch;  // from row to row of a block
    long long destination_pitch;
    int rows;
    int row_bytes;
    int token_bytes;  // in a row; 0 where a row has one value for all its tokens
    int unused;
};

// A word of a piece whose rows have `row_words` each.
template <typename Word, typename Byte>
__device__ auto *at(Byte *piece, long long pitch, unsigned row_words, unsigned word) {
    const unsigned row = word < row_words ? 0 : word / row_words;
    return (Word *)(piece + row * pitch + (long long)(word - row * row_words) * sizeof(Word));
}

// The words from `begin` to `end` of a piece.
template <typename Word>
__device__ void copy_words(const char *source, char *destination, long long source_pitch,
                           long long destination_pitch, unsigned row_words, unsigned begin,
                           unsigned end) {
    // Loads in flight before the first of them is needed: what hides the latency of memory.
    constexpr unsigned depth = 4;
    for (unsigned first = begin + threadIdx.x; first < end; first += depth * blockDim.x) {
        Word words[depth];
#pragma unroll
        for (unsigned i = 0; i < depth; ++i) {
            const unsigned word = first + i * blockDim.x;
            if (word < end) {
                words[i] = *at<const Word>(source, source_pitch, row_words, word);
            }
        }
        // Addresses are found again here: keeping them took 80 registers a thread, not 47.
#pragma unroll
        for (unsigned i = 0; i < depth; ++i) {
            const unsigned word = first + i * blockDim.x;
            if (word < end) {
                *at<Word>(destination, destination_pitch, row_words, word) = words[i];
            }
        }
    }
}

extern "C" __global__ void copy_blocks(const Plane *planes, const int *pairs, const int *n_tokens,
                                       unsigned num_planes, unsigned num_pairs,
                                       unsigned tile_bytes, unsigned tiles) {
    // An item is a tile of a plane of a pair. The launch keeps their number below 2^31.
    const unsigned items = num_pairs * num_planes * tiles;
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
        const unsigned tile = item % tiles;
        const unsigned of_pair = item / tiles;
        const Plane &plane = planes[of_pair % num_planes];
        const unsigned pair = of_pair / num_planes;
        const int source_block = pairs[2 * pair];
        const int destination_block = pairs[2 * pair + 1];
        if (source_block < 0 || destination_block < 0) {
            continue;
        }
        unsigned rows = plane.rows;
        unsigned row_bytes = plane.row_bytes;
        if (n_tokens != nullptr) {
            if (n_tokens[pair] == 0) {
                continue;
            }
            if (plane.token_bytes != 0) {
                row_bytes = n_tokens[pair] * plane.token_bytes;
            }
        }
        if (row_bytes == plane.source_pitch && row_bytes == plane.destination_pitch) {
            row_bytes *= rows;
            rows = 1;
        }
        const unsigned size = rows * row_bytes;
        const unsigned begin = tile * tile_bytes;
        if (begin >= size) {
            continue;
        }
        const unsigned end = size - begin < tile_bytes ? size : begin + tile_bytes;
        const char *source = plane.source + source_block * plane.source_stride;
        char *destination = plane.destination + destination_block * plane.destination_stride;
        const unsigned long long bits =
            (unsigned long long)source | (unsigned long long)destination | row_bytes |
            plane.source_pitch | plane.destination_pitch;
        if (bits % 16 == 0) {
            copy_words<uint4>(source, destination, plane.source_pitch, plane.destination_pitch,
                              row_bytes / 16, begin / 16, end / 16);
        } else if (bits % 4 == 0) {
            copy_words<unsigned>(source, destination, plane.source_pitch,
                                 plane.destination_pitch, row_bytes / 4, begin / 4, end / 4);
        } else {
            copy_words<char>(source, destination, plane.source_pitch, plane.destination_pitch,
                             row_bytes, begin, end);
        }
    }
}
