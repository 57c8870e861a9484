/* BLAKE2b-128 (RFC 7693) of many rows, four at a time: hashlib does one, at less than half the speed.
 *
 * Each 64-bit lane of a vector belongs to another row. A lane whose row has ended takes the next one.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as the machine has them; hashlib is used instead"
#endif

enum { LANES = 4, BLOCK = 128, ROUNDS = 12, DIGEST = 16 };

typedef uint64_t Words __attribute__((vector_size(8 * LANES)));

static const uint64_t IV[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                               0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_AVX2_TOO __attribute__((target_clones("avx2", "default"))) /* chosen when the module is loaded */
#else
#define FOR_AVX2_TOO
#endif

#define ROTATE(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define MIX(a, b, c, d, x, y) \
    a += b + (x); d = ROTATE(d ^ a, 32); c += d; b = ROTATE(b ^ c, 24); \
    a += b + (y); d = ROTATE(d ^ a, 16); c += d; b = ROTATE(b ^ c, 63);

/* One block of each lane. `count` and `last` are words 12 and 14 of RFC 7693, section 3.2. */
FOR_AVX2_TOO static void compress(uint64_t state[8][LANES], const uint64_t blocks[16][LANES], const uint64_t count[LANES],
                                  const uint64_t last[LANES]) {
    Words m[16], v[16], flags[2];
    for (int i = 0; i < 16; i++)
        memcpy(&m[i], blocks[i], sizeof m[i]);
    for (int i = 0; i < 8; i++) {
        memcpy(&v[i], state[i], sizeof v[i]);
        v[i + 8] = (Words){IV[i], IV[i], IV[i], IV[i]};
    }
    memcpy(&flags[0], count, sizeof flags[0]);
    memcpy(&flags[1], last, sizeof flags[1]);
    v[12] ^= flags[0];
    v[14] ^= flags[1];
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *s = SIGMA[round % 10];
        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]])
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]])
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]])
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]])
    }
    for (int i = 0; i < 8; i++) {
        Words mixed = v[i] ^ v[i + 8];
        for (int lane = 0; lane < LANES; lane++)
            state[i][lane] ^= mixed[lane];
    }
}

typedef struct {
    const char *at; /* what isn't hashed yet */
    Py_ssize_t left, done;
    Py_ssize_t row; /* -1: no row is left */
} Lane;

typedef struct {
    uint64_t state[8][LANES], blocks[16][LANES], count[LANES], last[LANES];
    Lane lanes[LANES];
} Hasher;

/* Give a lane a row, or nothing to do. */
static void start(Hasher *hasher, int lane, const char *data, const int64_t *bounds, Py_ssize_t row, Py_ssize_t num_rows) {
    bool is_idle = row >= num_rows;
    hasher->lanes[lane] = (Lane){.at = is_idle ? data : data + bounds[row],
                                 .left = is_idle ? 0 : (Py_ssize_t)(bounds[row + 1] - bounds[row]),
                                 .row = is_idle ? -1 : row};
    for (int i = 0; i < 8; i++)
        hasher->state[i][lane] = IV[i];
    hasher->state[0][lane] ^= 0x01010000 ^ DIGEST; /* no key, fanout and depth 1 */
}

/* The next block of a lane's row, filled up with zeros. */
static void load(Hasher *hasher, int number) {
    Lane *lane = &hasher->lanes[number];
    Py_ssize_t size = lane->left < BLOCK ? lane->left : BLOCK;
    char padded[BLOCK] = {0};
    const char *block = lane->at;
    if (size < BLOCK)
        block = memcpy(padded, lane->at, (size_t)size);
    for (int i = 0; i < 16; i++)
        memcpy(&hasher->blocks[i][number], block + 8 * i, 8);
    lane->at += size;
    lane->left -= size;
    lane->done += size;
    hasher->count[number] = (uint64_t)lane->done;
    hasher->last[number] = lane->left == 0 ? ~(uint64_t)0 : 0;
}

/* The digests of the rows, behind one another. */
static void hash_rows(const char *data, const int64_t *bounds, Py_ssize_t num_rows, char *digests) {
    Hasher hasher;
    Py_ssize_t next = 0, num_done = 0;
    for (int lane = 0; lane < LANES; lane++)
        start(&hasher, lane, data, bounds, next++, num_rows);
    while (num_done < num_rows) {
        for (int lane = 0; lane < LANES; lane++)
            load(&hasher, lane);
        compress(hasher.state, hasher.blocks, hasher.count, hasher.last);
        for (int lane = 0; lane < LANES; lane++) {
            Py_ssize_t row = hasher.lanes[lane].row;
            if (row < 0 || hasher.last[lane] == 0)
                continue;
            for (int i = 0; i < DIGEST / 8; i++)
                memcpy(digests + row * DIGEST + 8 * i, &hasher.state[i][lane], 8);
            num_done++;
            start(&hasher, lane, data, bounds, next++, num_rows);
        }
    }
}

PyDoc_STRVAR(hashes_doc, "blake2b_rows(data, bounds)\n--\n\n"
                         "BLAKE2b-128 of each row, behind one another: row i is data[bounds[i]:bounds[i + 1]], bounds are int64.");

static PyObject *blake2b_rows(PyObject *Py_UNUSED(module), PyObject *arguments) {
    Py_buffer data, bounds;
    if (!PyArg_ParseTuple(arguments, "y*y*:blake2b_rows", &data, &bounds))
        return NULL;
    PyObject *digests = NULL;
    const int64_t *places = bounds.buf;
    Py_ssize_t num_rows = bounds.len / 8 - 1;
    bool is_good = num_rows >= 0 && bounds.len % 8 == 0 && places[0] >= 0 && places[num_rows] <= data.len;
    for (Py_ssize_t i = 0; is_good && i < num_rows; i++)
        is_good = places[i] <= places[i + 1];
    if (!is_good)
        PyErr_Format(PyExc_ValueError, "bounds: expected int64 that ascend within %zd bytes", data.len);
    else if ((digests = PyBytes_FromStringAndSize(NULL, num_rows * DIGEST)) != NULL) {
        Py_BEGIN_ALLOW_THREADS /* both buffers are held */
        hash_rows(data.buf, places, num_rows, PyBytes_AS_STRING(digests));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&bounds);
    return digests;
}

static PyMethodDef METHODS[] = {{"blake2b_rows", blake2b_rows, METH_VARARGS, hashes_doc}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_row_hashes", "Content hashes of many rows at once.", 0, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__row_hashes(void) { return PyModule_Create(&MODULE); }
