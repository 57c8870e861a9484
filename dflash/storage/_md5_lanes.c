/* MD5 (RFC 1321) of many buffers, eight at a time: each step of MD5 waits for the one before, so that one buffer alone
 * leaves most of a core idle.
 *
 * Each 32-bit lane of a vector belongs to another buffer. A lane whose buffer has ended takes the next one.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || defined(__clang__)
#error "vectors are shuffled as GCC writes it; hashlib is used instead"
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as the machine has them; hashlib is used instead"
#endif

enum { LANES = 8, FEW = 3 /* busy lanes that are slower together than one after another */, BLOCK = 64, DIGEST = 16, LENGTH_AT = 56 };

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

#if defined(__x86_64__) && defined(__linux__)
#define FOR_AVX2_TOO __attribute__((target_clones("avx2", "default"))) /* chosen when the module is loaded */
#else
#define FOR_AVX2_TOO
#endif

#define F(x, y, z) ((z) ^ ((x) & ((y) ^ (z))))
#define G(x, y, z) ((y) ^ ((z) & ((x) ^ (y))))
#define H(x, y, z) ((x) ^ (y) ^ (z))
#define I(x, y, z) ((y) ^ ((x) | ~(z)))
#define STEP(f, a, b, c, d, word, constant, n) \
    a += f(b, c, d) + m[word] + (uint32_t)(constant); a = (a << (n) | a >> (32 - (n))) + b;
#define FOUR(f, w0, w1, w2, w3, c0, c1, c2, c3, n0, n1, n2, n3) \
    STEP(f, a, b, c, d, w0, c0, n0) STEP(f, d, a, b, c, w1, c1, n1) \
    STEP(f, c, d, a, b, w2, c2, n2) STEP(f, b, c, d, a, w3, c3, n3)

#define ROUNDS \
    FOUR(F, 0, 1, 2, 3, 0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 7, 12, 17, 22) \
    FOUR(F, 4, 5, 6, 7, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501, 7, 12, 17, 22) \
    FOUR(F, 8, 9, 10, 11, 0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 7, 12, 17, 22) \
    FOUR(F, 12, 13, 14, 15, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821, 7, 12, 17, 22) \
    FOUR(G, 1, 6, 11, 0, 0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 5, 9, 14, 20) \
    FOUR(G, 5, 10, 15, 4, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8, 5, 9, 14, 20) \
    FOUR(G, 9, 14, 3, 8, 0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 5, 9, 14, 20) \
    FOUR(G, 13, 2, 7, 12, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a, 5, 9, 14, 20) \
    FOUR(H, 5, 8, 11, 14, 0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 4, 11, 16, 23) \
    FOUR(H, 1, 4, 7, 10, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70, 4, 11, 16, 23) \
    FOUR(H, 13, 0, 3, 6, 0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 4, 11, 16, 23) \
    FOUR(H, 9, 12, 15, 2, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665, 4, 11, 16, 23) \
    FOUR(I, 0, 7, 14, 5, 0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 6, 10, 15, 21) \
    FOUR(I, 12, 3, 10, 1, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1, 6, 10, 15, 21) \
    FOUR(I, 8, 15, 6, 13, 0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 6, 10, 15, 21) \
    FOUR(I, 4, 11, 2, 9, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391, 6, 10, 15, 21)

#define PAIRS(x, y, i, j, k, l) __builtin_shuffle(x, y, (Words){i, 8 + i, j, 8 + j, k, 8 + k, l, 8 + l})
#define HALVES(x, y, i, j) __builtin_shuffle(x, y, (Words){i, i + 1, 8 + i, 9 + i, j, j + 1, 8 + j, 9 + j})
#define SIDES(x, y, i) __builtin_shuffle(x, y, (Words){i, i + 1, i + 2, i + 3, 8 + i, 9 + i, 10 + i, 11 + i})

/* From eight words of each lane to each of these words of all lanes. */
#define TRANSPOSE(m, at, offset) \
    do { \
        Words r[LANES], p[LANES], h[LANES]; \
        for (int i = 0; i < LANES; i++) \
            memcpy(&r[i], (at)[i] + (offset), sizeof r[i]); \
        for (int i = 0; i < LANES; i += 2) { \
            p[i] = PAIRS(r[i], r[i + 1], 0, 1, 4, 5); \
            p[i + 1] = PAIRS(r[i], r[i + 1], 2, 3, 6, 7); \
        } \
        for (int i = 0; i < LANES; i += 4) \
            for (int j = 0; j < 2; j++) { \
                h[i + 2 * j] = HALVES(p[i + j], p[i + 2 + j], 0, 4); \
                h[i + 2 * j + 1] = HALVES(p[i + j], p[i + 2 + j], 2, 6); \
            } \
        for (int i = 0; i < 4; i++) { \
            (m)[i] = SIDES(h[i], h[i + 4], 0); \
            (m)[i + 4] = SIDES(h[i], h[i + 4], 4); \
        } \
    } while (0)

/* Some blocks of each lane, behind one another. */
FOR_AVX2_TOO static void compress(Words state[4], const char *const begin[LANES], Py_ssize_t num_blocks) {
    const char *at[LANES];
    memcpy(at, begin, sizeof at);
    for (Py_ssize_t block = 0; block < num_blocks; block++) {
        Words m[16], a = state[0], b = state[1], c = state[2], d = state[3];
        TRANSPOSE(m, at, 0);
        TRANSPOSE(m + 8, at, BLOCK / 2);
        ROUNDS
        state[0] += a;
        state[1] += b;
        state[2] += c;
        state[3] += d;
        for (int lane = 0; lane < LANES; lane++)
            at[lane] += BLOCK;
    }
}

/* Some blocks of one lane. */
static void compress_alone(Words state[4], int lane, const char *at, Py_ssize_t num_blocks) {
    uint32_t sums[4], m[16];
    for (int i = 0; i < 4; i++)
        sums[i] = state[i][lane];
    for (Py_ssize_t block = 0; block < num_blocks; block++) {
        uint32_t a = sums[0], b = sums[1], c = sums[2], d = sums[3];
        memcpy(m, at + block * BLOCK, BLOCK);
        ROUNDS
        sums[0] += a;
        sums[1] += b;
        sums[2] += c;
        sums[3] += d;
    }
    for (int i = 0; i < 4; i++)
        state[i][lane] = sums[i];
}

typedef struct {
    const char *at; /* what isn't hashed yet */
    Py_ssize_t left;
    Py_ssize_t buffer; /* -1: none is left */
    char tail[2 * BLOCK]; /* the last bytes and the padding of RFC 1321, sections 3.1 and 3.2 */
    bool is_in_tail;
} Lane;

typedef struct {
    Words state[4];
    Lane lanes[LANES];
} Hasher;

/* Give a lane a buffer, or nothing to do. */
static void start(Hasher *hasher, int number, const Py_buffer *buffers, Py_ssize_t next, Py_ssize_t num_buffers) {
    static const uint32_t INITIAL[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
    Lane *lane = &hasher->lanes[number];
    memset(lane, 0, sizeof *lane);
    lane->buffer = -1;
    if (next < num_buffers) {
        Py_ssize_t size = buffers[next].len, rest = size % BLOCK;
        uint64_t num_bits = (uint64_t)size * 8;
        lane->buffer = next;
        lane->at = buffers[next].buf;
        lane->left = size - rest;
        if (rest)
            memcpy(lane->tail, lane->at + lane->left, (size_t)rest);
        lane->tail[rest] = (char)0x80;
        memcpy(lane->tail + (rest < LENGTH_AT ? 0 : BLOCK) + LENGTH_AT, &num_bits, sizeof num_bits);
    }
    for (int i = 0; i < 4; i++)
        hasher->state[i][number] = INITIAL[i];
}

/* Let a lane go on with its tail where its buffer has no whole block left. */
static void turn_to_tail(Lane *lane, const Py_buffer *buffers) {
    if (lane->buffer >= 0 && lane->left == 0 && !lane->is_in_tail) {
        lane->at = lane->tail;
        lane->left = buffers[lane->buffer].len % BLOCK < LENGTH_AT ? BLOCK : 2 * BLOCK;
        lane->is_in_tail = true;
    }
}

/* The digests of the buffers, behind one another. */
static void hash_all(const Py_buffer *buffers, Py_ssize_t num_buffers, char *digests) {
    Hasher hasher;
    Py_ssize_t next = 0, num_done = 0;
    for (int lane = 0; lane < LANES; lane++)
        start(&hasher, lane, buffers, next++, num_buffers);
    while (num_done < num_buffers) {
        const char *at[LANES], *busy = NULL;
        Py_ssize_t num_blocks = PY_SSIZE_T_MAX;
        int num_busy = 0;
        for (int i = 0; i < LANES; i++) {
            Lane *lane = &hasher.lanes[i];
            turn_to_tail(lane, buffers);
            if (lane->buffer < 0)
                continue;
            busy = lane->at;
            num_busy++;
            if (lane->left / BLOCK < num_blocks)
                num_blocks = lane->left / BLOCK;
        }
        for (int i = 0; i < LANES; i++) /* what an idle lane reads is as good as anything */
            at[i] = hasher.lanes[i].buffer < 0 ? busy : hasher.lanes[i].at;
        if (num_busy >= FEW)
            compress(hasher.state, at, num_blocks);
        for (int i = 0; num_busy < FEW && i < LANES; i++)
            if (hasher.lanes[i].buffer >= 0)
                compress_alone(hasher.state, i, at[i], num_blocks);
        for (int i = 0; i < LANES; i++) {
            Lane *lane = &hasher.lanes[i];
            if (lane->buffer < 0)
                continue;
            lane->at += num_blocks * BLOCK;
            lane->left -= num_blocks * BLOCK;
            if (lane->left > 0 || !lane->is_in_tail)
                continue;
            for (int word = 0; word < 4; word++) {
                uint32_t sum = hasher.state[word][i];
                memcpy(digests + lane->buffer * DIGEST + 4 * word, &sum, sizeof sum);
            }
            num_done++;
            start(&hasher, i, buffers, next++, num_buffers);
        }
    }
}

PyDoc_STRVAR(md5_doc, "md5_of_each(buffers)\n--\n\nMD5 of each of a sequence of buffers.");

static PyObject *md5_of_each(PyObject *Py_UNUSED(module), PyObject *argument) {
    PyObject *sequence = PySequence_Fast(argument, "buffers: expected a sequence");
    if (sequence == NULL)
        return NULL;
    Py_ssize_t num_buffers = PySequence_Fast_GET_SIZE(sequence), num_held = 0;
    Py_buffer *buffers = PyMem_Calloc((size_t)num_buffers + 1, sizeof *buffers);
    char *digests = PyMem_Malloc((size_t)num_buffers * DIGEST + 1);
    PyObject *result = NULL;
    if (buffers == NULL || digests == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; num_held < num_buffers; num_held++)
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, num_held), &buffers[num_held], PyBUF_SIMPLE) < 0)
            goto done;
    Py_BEGIN_ALLOW_THREADS /* the buffers are held */
    hash_all(buffers, num_buffers, digests);
    Py_END_ALLOW_THREADS
    result = PyList_New(num_buffers);
    for (Py_ssize_t i = 0; result != NULL && i < num_buffers; i++) {
        PyObject *digest = PyBytes_FromStringAndSize(digests + i * DIGEST, DIGEST);
        if (digest == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, i, digest);
    }
done:
    while (num_held > 0)
        PyBuffer_Release(&buffers[--num_held]);
    PyMem_Free(digests);
    PyMem_Free(buffers);
    Py_DECREF(sequence);
    return result;
}

static PyMethodDef METHODS[] = {{"md5_of_each", md5_of_each, METH_O, md5_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_md5_lanes", "MD5 of many buffers at once.", 0, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__md5_lanes(void) { return PyModule_Create(&MODULE); }
