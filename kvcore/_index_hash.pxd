# The hash by which the prefix index finds candidates. Nothing trusts it: a candidate is
# compared with what was asked for.
#
# A block of tokens is compressed by NH (Black, Halevi, Krawczyk, Krovetz, Rogaway:
# "UMAC", CRYPTO 1999): each pair of tokens, shifted by secret words, is multiplied. The
# sums of a chain of blocks are the coefficients of a polynomial over the integers modulo
# 2**61 - 1, evaluated at a secret point by Horner's rule (Carter and Wegman, 1979). Who
# does not know the secrets cannot choose two prompts that collide more often than by
# chance, so nobody can make the index slow for others.

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from *:
    """
    #if defined(_MSC_VER) && !defined(__clang__)
    #include <intrin.h>
    static __inline unsigned __int64 kvcore_multiply_61(unsigned __int64 a, unsigned __int64 b)
    {
        unsigned __int64 high, low;
    #if defined(_M_ARM64)
        low = a * b;
        high = __umulh(a, b);
    #else
        low = _umul128(a, b, &high);
    #endif
        return (low & 0x1FFFFFFFFFFFFFFFULL) + ((high << 3) | (low >> 61));
    }
    #else
    static inline unsigned long long kvcore_multiply_61(unsigned long long a, unsigned long long b)
    {
        unsigned __int128 product = (unsigned __int128)a * b;
        return ((unsigned long long)product & 0x1FFFFFFFFFFFFFFFULL)
            + (unsigned long long)(product >> 61);
    }
    #endif

    #if defined(__SSE2__) || defined(_M_X64)
    #include <emmintrin.h>
    #endif
    /* Sums (a + a's word) * (b + b's word) over the pairs (a, b) of tokens; count is even. */
    static inline unsigned long long kvcore_nh(
        const int *tokens, const unsigned int *words, int count)
    {
        unsigned long long total = 0;
        int i = 0;
    #if defined(__SSE2__) || defined(_M_X64)
        __m128i sum = _mm_setzero_si128();
        unsigned long long lanes[2];
        for (; i + 4 <= count; i += 4) {
            __m128i shifted = _mm_add_epi32(
                _mm_loadu_si128((const __m128i *)(tokens + i)),
                _mm_loadu_si128((const __m128i *)(words + i)));
            sum = _mm_add_epi64(sum, _mm_mul_epu32(shifted, _mm_srli_epi64(shifted, 32)));
        }
        _mm_storeu_si128((__m128i *)lanes, sum);
        total = lanes[0] + lanes[1];
    #endif
        for (; i < count; i += 2)
            total += (unsigned long long)((unsigned int)tokens[i] + words[i])
                * ((unsigned int)tokens[i + 1] + words[i + 1]);
        return total;
    }
    """
    uint64_t pair_products "kvcore_nh"(
        const int32_t *tokens, const uint32_t *words, int32_t count
    ) noexcept nogil
    # Their product modulo 2**61 - 1, folded once: below 2**63 if a < 2**63 and b < 2**60.
    uint64_t multiply_61 "kvcore_multiply_61"(uint64_t a, uint64_t b) noexcept nogil

cdef enum:
    HASH_BITS = 63

# Set in every hash, so that 0 can stand for "not computed yet".
cdef extern from *:
    """
    #define KVCORE_COMPUTED 0x8000000000000000ULL
    #define KVCORE_61_BITS 0x1FFFFFFFFFFFFFFFULL
    """
    const uint64_t COMPUTED "KVCORE_COMPUTED"
    const uint64_t LOW_61_BITS "KVCORE_61_BITS"


cdef struct hash_key_t:
    uint64_t point   # below 2**60
    uint64_t mask    # of the bits that a hash may have
    int32_t block_size
    uint32_t *words  # a secret word for each token of a block, and one more


cdef inline uint64_t hash_block(
    const hash_key_t *key, uint64_t previous, const int32_t *tokens, uint64_t tweak
) noexcept nogil:
    """The hash of a chain that ends in these ``block_size`` tokens.

    ``previous`` is the hash of the chain before them, 0 at the root, and ``tweak`` stands
    for what else the block's identity holds. One multiplication for each two tokens; only
    the last one waits for the block before.
    """
    cdef int32_t last = key.block_size - 1
    cdef uint64_t total
    if key.block_size == 16:
        total = tweak + pair_products(tokens, key.words, 16)  # of constant length
    else:
        total = tweak + pair_products(tokens, key.words, key.block_size & ~1)
    if not last & 1:
        total += (
            <uint64_t>(<uint32_t>(<uint32_t>tokens[last] + key.words[last]))
            * key.words[last + 1]
        )
    total = (total & LOW_61_BITS) + (total >> 61)
    return (multiply_61((previous & ~COMPUTED) + total, key.point) & key.mask) | COMPUTED
