/* From lines of a completions file straight to prompt and response, for records as most are.
 *
 * A record is plain if it is an object of the usual fields with the usual types, its messages are texts, and a program
 * of dflash.data.turn_program (what a chat template does to conversations of its shape) fits. Whatever isn't plain, or
 * isn't even JSON, is handed back as a line for the general code in Python, which alone judges and explains. So this
 * file rejects nothing, and each of its rules may be stricter than the general one, never laxer.
 *
 * Texts are spans of UTF-8 in an arena that a line's strings share, without their escapes.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structseq.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    MAX_MESSAGES = 64,      /* as template_trace.MAX_MESSAGES; a test compares them */
    MAX_REGISTERS = 512,    /* of a program */
    MAX_KEYS = 32,          /* of an object */
    MAX_DEPTH = 16,         /* of a value in a field that isn't read */
    MAX_NUMBER = 64,        /* characters of a number */
    MAX_DIGITS = 18,        /* of an integer that is read: fits in 64 bits */
    LINES_PER_CHECK = 256,  /* of which a row at least carries its line, to be made again */
    KEPT_BYTES = 8 << 20    /* of a buffer after a block with a longer line */
};

typedef struct {
    const char *start;
    Py_ssize_t size;
} Span;

#define SPAN(literal) ((Span){literal, sizeof(literal) - 1})

/* ---- Text ---- */

static const uint64_t ONES = 0x0101010101010101u, HIGHS = 0x8080808080808080u;

static inline uint64_t load8(const char *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}

/* High bit of each byte that equals `byte`; bytes behind the first such may be marked wrongly. */
static inline uint64_t bytes_equal(uint64_t word, uint8_t byte) {
    uint64_t other = word ^ (ONES * byte);
    return (other - ONES) & ~other & HIGHS;
}

static inline bool equals(Span one, Span other) {
    return one.size == other.size && memcmp(one.start, other.start, (size_t)one.size) == 0;
}

static inline bool starts_with(Span text, Span part) {
    return part.size <= text.size && memcmp(text.start, part.start, (size_t)part.size) == 0;
}

static inline bool ends_with(Span text, Span part) {
    return part.size <= text.size &&
           memcmp(text.start + text.size - part.size, part.start, (size_t)part.size) == 0;
}

static bool contains(Span text, Span part) {
    if (part.size == 0 || part.size > text.size)
        return part.size == 0;
    const char *at = text.start, *last = text.start + text.size - part.size;
    while (at <= last && (at = memchr(at, part.start[0], (size_t)(last - at) + 1)) != NULL) {
        if (memcmp(at, part.start, (size_t)part.size) == 0)
            return true;
        at++;
    }
    return false;
}

static inline bool is_continuation(char byte) { return ((uint8_t)byte & 0xC0) == 0x80; }

/* The code point at `at`, in valid UTF-8, and how many bytes it takes. */
static inline Py_UCS4 decode_at(const char *at, int *size) {
    uint8_t lead = (uint8_t)at[0];
    if (lead < 0x80) {
        *size = 1;
        return lead;
    }
    if (lead < 0xE0) {
        *size = 2;
        return (Py_UCS4)(lead & 0x1F) << 6 | (at[1] & 0x3F);
    }
    if (lead < 0xF0) {
        *size = 3;
        return (Py_UCS4)(lead & 0x0F) << 12 | (Py_UCS4)(at[1] & 0x3F) << 6 | (at[2] & 0x3F);
    }
    *size = 4;
    return (Py_UCS4)(lead & 0x07) << 18 | (Py_UCS4)(at[1] & 0x3F) << 12 | (Py_UCS4)(at[2] & 0x3F) << 6 |
           (at[3] & 0x3F);
}

/* Whether all of it is UTF-8 as Python decodes it: no overlong forms, no surrogates, nothing above U+10FFFF. */
static bool is_utf8(const char *at, const char *end) {
    while (at < end) {
        if (end - at >= 8 && !(load8(at) & HIGHS)) {
            at += 8;
            continue;
        }
        uint8_t lead = (uint8_t)*at;
        if (lead < 0x80) {
            at++;
            continue;
        }
        int more = lead >= 0xC2 && lead < 0xE0 ? 1 : lead >= 0xE0 && lead < 0xF0 ? 2 : lead >= 0xF0 && lead < 0xF5 ? 3 : 0;
        if (more == 0 || end - at <= more)
            return false;
        for (int i = 1; i <= more; i++)
            if (!is_continuation(at[i]))
                return false;
        uint8_t second = (uint8_t)at[1];
        if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second >= 0xA0) || (lead == 0xF0 && second < 0x90) ||
            (lead == 0xF4 && second >= 0x90))
            return false;
        at += 1 + more;
    }
    return true;
}

/* What str.strip and its kin cut: white space where `chars` is NULL. */
typedef struct {
    Py_UCS4 *chars;
    Py_ssize_t count;
} CharSet;

static inline bool is_cut(Py_UCS4 point, const CharSet *set) {
    if (set->chars == NULL)
        return Py_UNICODE_ISSPACE(point);
    for (Py_ssize_t i = 0; i < set->count; i++)
        if (set->chars[i] == point)
            return true;
    return false;
}

static Span strip(Span text, const CharSet *set, bool left, bool right) {
    const char *at = text.start, *end = text.start + text.size;
    int size;
    while (left && at < end && is_cut(decode_at(at, &size), set))
        at += size;
    while (right && at < end) {
        const char *last = end - 1;
        while (is_continuation(*last))
            last--;
        if (!is_cut(decode_at(last, &size), set))
            break;
        end = last;
    }
    return (Span){at, end - at};
}

static const CharSet WHITE_SPACE = {NULL, 0};

static inline bool is_blank(Span text) { return strip(text, &WHITE_SPACE, true, false).size == 0; }

/* ---- Programs ---- */

enum Function { STRIP, LSTRIP, RSTRIP, STARTSWITH, ENDSWITH, CONTAINS, EQUALS, IS_TRUE, NUM_FUNCTIONS };
static const char *const FUNCTION_NAMES[NUM_FUNCTIONS] = {"strip",    "lstrip",   "rstrip", "startswith",
                                                          "endswith", "contains", "equals", "is_true"};

typedef struct {
    enum Function function;
    Py_ssize_t source;
    Span argument;
    CharSet set;
    bool expected; /* of a test; what isn't one makes a register */
} Step;

typedef struct {
    Py_ssize_t source; /* a register, or -1 for the literal */
    Span literal;
} Piece;

typedef struct {
    Piece *items;
    Py_ssize_t count;
} Pieces;

typedef struct {
    Span shape; /* what chat_template_kwargs say of thinking, then the messages' kinds */
    Py_ssize_t num_texts;
    Step *steps;
    Py_ssize_t num_steps;
    Pieces prompt, response;
} Program;

static void free_program(Program *program) {
    for (Py_ssize_t i = 0; i < program->num_steps; i++)
        PyMem_Free(program->steps[i].set.chars);
    PyMem_Free(program->steps);
    PyMem_Free(program->prompt.items);
    PyMem_Free(program->response.items);
}

/* Whether the program fits these texts, which are the first registers. */
static bool run(const Program *program, Span *registers) {
    Py_ssize_t next = program->num_texts;
    for (Py_ssize_t i = 0; i < program->num_steps; i++) {
        const Step *step = &program->steps[i];
        Span text = registers[step->source];
        bool found = false;
        switch (step->function) {
        case STRIP:
        case LSTRIP:
        case RSTRIP:
            registers[next++] = strip(text, &step->set, step->function != RSTRIP, step->function != LSTRIP);
            continue;
        case STARTSWITH:
            found = starts_with(text, step->argument);
            break;
        case ENDSWITH:
            found = ends_with(text, step->argument);
            break;
        case CONTAINS:
            found = contains(text, step->argument);
            break;
        case EQUALS:
            found = equals(text, step->argument);
            break;
        case IS_TRUE:
            found = text.size > 0;
            break;
        case NUM_FUNCTIONS: /* isn't a function */
            return false;
        }
        if (found != step->expected)
            return false;
    }
    return true;
}

static inline Span text_of(const Piece *piece, const Span *registers) {
    return piece->source < 0 ? piece->literal : registers[piece->source];
}

/* The pieces as one Python string; the result of `run` is in the registers. */
static PyObject *join(const Pieces *pieces, const Span *registers, char **scratch, Py_ssize_t *capacity) {
    Py_ssize_t size = 0;
    for (Py_ssize_t i = 0; i < pieces->count; i++)
        size += text_of(&pieces->items[i], registers).size;
    if (size > *capacity) {
        char *larger = PyMem_Realloc(*scratch, (size_t)size);
        if (larger == NULL)
            return PyErr_NoMemory();
        *scratch = larger;
        *capacity = size;
    }
    char *out = *scratch;
    for (Py_ssize_t i = 0; i < pieces->count; i++) {
        Span text = text_of(&pieces->items[i], registers);
        memcpy(out, text.start, (size_t)text.size);
        out += text.size;
    }
    return PyUnicode_DecodeUTF8(*scratch, size, NULL);
}

/* ---- JSON ---- */

/* Where reading a line has come to. All functions below return false for what isn't plain JSON. */
typedef struct {
    const char *at, *end;
    char *arena; /* where the next text without its escapes goes; room for the whole line */
} Reader;

static inline void skip_space(Reader *reader) {
    while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\t' || *reader->at == '\r'))
        reader->at++;
}

static inline bool take(Reader *reader, char expected) {
    skip_space(reader);
    if (reader->at == reader->end || *reader->at != expected)
        return false;
    reader->at++;
    return true;
}

static inline bool take_word(Reader *reader, Span word) {
    if (!starts_with((Span){reader->at, reader->end - reader->at}, word))
        return false;
    reader->at += word.size;
    return true;
}

static bool read_hex4(Reader *reader, Py_UCS4 *unit) {
    if (reader->end - reader->at < 4)
        return false;
    *unit = 0;
    for (int i = 0; i < 4; i++) {
        char c = *reader->at++;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0)
            return false;
        *unit = *unit << 4 | (Py_UCS4)digit;
    }
    return true;
}

static char *write_utf8(char *out, Py_UCS4 point) {
    if (point < 0x80) {
        *out++ = (char)point;
    } else if (point < 0x800) {
        *out++ = (char)(0xC0 | point >> 6);
        *out++ = (char)(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
        *out++ = (char)(0xE0 | point >> 12);
        *out++ = (char)(0x80 | (point >> 6 & 0x3F));
        *out++ = (char)(0x80 | (point & 0x3F));
    } else {
        *out++ = (char)(0xF0 | point >> 18);
        *out++ = (char)(0x80 | (point >> 12 & 0x3F));
        *out++ = (char)(0x80 | (point >> 6 & 0x3F));
        *out++ = (char)(0x80 | (point & 0x3F));
    }
    return out;
}

/* One escape, behind its backslash; false for half of a surrogate pair too. */
static bool read_escape(Reader *reader, char **out) {
    if (reader->at == reader->end)
        return false;
    char plain;
    switch (*reader->at++) {
    case '"': plain = '"'; break;
    case '\\': plain = '\\'; break;
    case '/': plain = '/'; break;
    case 'b': plain = '\b'; break;
    case 'f': plain = '\f'; break;
    case 'n': plain = '\n'; break;
    case 'r': plain = '\r'; break;
    case 't': plain = '\t'; break;
    case 'u': {
        Py_UCS4 point, low;
        if (!read_hex4(reader, &point))
            return false;
        if (point >= 0xD800 && point < 0xE000) {
            if (point >= 0xDC00 || !take_word(reader, SPAN("\\u")) || !read_hex4(reader, &low) || low < 0xDC00 || low >= 0xE000)
                return false;
            point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
        }
        *out = write_utf8(*out, point);
        return true;
    }
    default: return false;
    }
    *(*out)++ = plain;
    return true;
}

/* Copies up to the next quote, backslash or control character, and returns that place; NULL where there is none. */
static const char *copy_plain(const char *at, const char *end, char **out) {
    char *to = *out;
    while (end - at >= 8) {
        uint64_t word = load8(at);
        uint64_t controls = (word - ONES * 0x20) & ~word & HIGHS;
        if (bytes_equal(word, '"') | bytes_equal(word, '\\') | controls)
            break;
        memcpy(to, at, 8);
        at += 8;
        to += 8;
    }
    while (at < end && *at != '"' && *at != '\\' && (uint8_t)*at >= 0x20)
        *to++ = *at++;
    *out = to;
    return at < end ? at : NULL;
}

static bool read_string(Reader *reader, Span *text) {
    if (!take(reader, '"'))
        return false;
    char *out = reader->arena;
    text->start = out;
    for (;;) {
        const char *stop = copy_plain(reader->at, reader->end, &out);
        if (stop == NULL || (uint8_t)*stop < 0x20)
            return false;
        reader->at = stop + 1;
        if (*stop == '"')
            break;
        if (!read_escape(reader, &out))
            return false;
    }
    text->size = out - text->start;
    reader->arena = out;
    return true;
}

/* A key as it stands; one with escapes could be equal to another that is written otherwise. */
static bool read_key(Reader *reader, Span *key) {
    if (!take(reader, '"'))
        return false;
    key->start = reader->at;
    for (; reader->at < reader->end && *reader->at != '"'; reader->at++)
        if (*reader->at == '\\' || (uint8_t)*reader->at < 0x20)
            return false;
    key->size = reader->at - key->start;
    return take(reader, '"') && take(reader, ':');
}

typedef struct {
    Span items[MAX_KEYS];
    int count;
} Keys;

static bool read_new_key(Reader *reader, Keys *keys, Span *key) {
    if (keys->count == MAX_KEYS || !read_key(reader, key))
        return false;
    for (int i = 0; i < keys->count; i++)
        if (equals(keys->items[i], *key))
            return false;
    keys->items[keys->count++] = *key;
    skip_space(reader);
    return true;
}

static bool read_number(Reader *reader, Span *number, bool *is_integer) {
    const char *start = reader->at, *at = start, *end = reader->end;
    *is_integer = true;
    if (at < end && *at == '-')
        at++;
    if (at == end || *at < '0' || *at > '9')
        return false;
    if (*at == '0')
        at++;
    else
        while (at < end && *at >= '0' && *at <= '9')
            at++;
    if (at < end && *at == '.') {
        *is_integer = false;
        const char *first = ++at;
        while (at < end && *at >= '0' && *at <= '9')
            at++;
        if (at == first)
            return false;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        *is_integer = false;
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        const char *first = at;
        while (at < end && *at >= '0' && *at <= '9')
            at++;
        if (at == first)
            return false;
    }
    *number = (Span){start, at - start};
    reader->at = at;
    return number->size <= MAX_NUMBER;
}

/* A value that isn't read, held to the rules all the same. */
static bool skip_value(Reader *reader, int depth) {
    Span ignored;
    bool is_integer;
    skip_space(reader);
    if (reader->at == reader->end || depth > MAX_DEPTH)
        return false;
    switch (*reader->at) {
    case '"': {
        char *arena = reader->arena;
        bool is_good = read_string(reader, &ignored);
        reader->arena = arena;
        return is_good;
    }
    case 't': return take_word(reader, SPAN("true"));
    case 'f': return take_word(reader, SPAN("false"));
    case 'n': return take_word(reader, SPAN("null"));
    case '[':
        reader->at++;
        if (take(reader, ']'))
            return true;
        do {
            if (!skip_value(reader, depth + 1))
                return false;
        } while (take(reader, ','));
        return take(reader, ']');
    case '{': {
        Keys keys = {.count = 0};
        reader->at++;
        if (take(reader, '}'))
            return true;
        do {
            if (!read_new_key(reader, &keys, &ignored) || !skip_value(reader, depth + 1))
                return false;
        } while (take(reader, ','));
        return take(reader, '}');
    }
    default: return read_number(reader, &ignored, &is_integer);
    }
}

/* ---- Records ---- */

typedef struct {
    char kind; /* s, d, u, t, a, or A for the assistant with a trace */
    Span content, trace;
} Message;

typedef struct {
    Message messages[MAX_MESSAGES];
    Py_ssize_t num_messages; /* 0: not read yet */
    Span id, source;
    bool has_id, has_source, has_stop;
    long long output_tokens; /* -1: not given */
    char thinking;           /* what chat_template_kwargs say: n nothing, t true, f false */
} Record;

static bool read_kind(Reader *reader, char *kind) {
    Span role;
    static const struct {
        Span name;
        char kind;
    } ROLES[] = {{{"user", 4}, 'u'}, {{"assistant", 9}, 'a'}, {{"system", 6}, 's'}, {{"tool", 4}, 't'}, {{"developer", 9}, 'd'}};
    if (!read_string(reader, &role))
        return false;
    for (size_t i = 0; i < sizeof ROLES / sizeof ROLES[0]; i++)
        if (equals(role, ROLES[i].name)) {
            *kind = ROLES[i].kind;
            return true;
        }
    return false;
}

/* A message of role and text, the assistant's perhaps with a trace; other fields have to be null. */
static bool read_message(Reader *reader, Message *message) {
    Keys keys = {.count = 0};
    Span key;
    bool has_content = false, has_trace = false;
    *message = (Message){.content = SPAN(""), .trace = SPAN("")};
    if (!take(reader, '{'))
        return false;
    do {
        if (!read_new_key(reader, &keys, &key))
            return false;
        if (equals(key, SPAN("role"))) {
            if (!read_kind(reader, &message->kind))
                return false;
        } else if (equals(key, SPAN("content"))) {
            if (!read_string(reader, &message->content))
                return false;
            has_content = true;
        } else if (!take_word(reader, SPAN("null"))) {
            if (!equals(key, SPAN("reasoning_content")) || !read_string(reader, &message->trace))
                return false;
            has_trace = true;
        }
    } while (take(reader, ','));
    if (!take(reader, '}') || message->kind == 0 || !has_content)
        return false;
    if (message->kind != 'a')
        return !has_trace;
    if (has_trace)
        message->kind = 'A';
    return !contains(message->content, SPAN("<think>")) && !contains(message->content, SPAN("</think>"));
}

static bool read_messages(Reader *reader, Record *record) {
    if (!take(reader, '['))
        return false;
    do {
        if (record->num_messages == MAX_MESSAGES || !read_message(reader, &record->messages[record->num_messages++]))
            return false;
    } while (take(reader, ','));
    return take(reader, ']') && (record->messages[record->num_messages - 1].kind | 0x20) == 'a';
}

static bool read_thinking(Reader *reader, char *thinking) {
    Span key;
    if (take_word(reader, SPAN("null")))
        return true;
    if (!take(reader, '{'))
        return false;
    if (take(reader, '}'))
        return true;
    if (!read_key(reader, &key) || !equals(key, SPAN("enable_thinking")))
        return false;
    skip_space(reader);
    if (take_word(reader, SPAN("true")))
        *thinking = 't';
    else if (take_word(reader, SPAN("false")))
        *thinking = 'f';
    else
        return false;
    return take(reader, '}');
}

/* Text, or null; an empty text counts as none. */
static bool read_label(Reader *reader, Span *label, bool *is_given) {
    if (take_word(reader, SPAN("null")))
        return true;
    if (!read_string(reader, label))
        return false;
    *is_given = label->size > 0;
    return true;
}

static bool read_integer(Reader *reader, Span *digits) {
    bool is_integer;
    return read_number(reader, digits, &is_integer) && is_integer && digits->start[0] != '-' && digits->size <= MAX_DIGITS;
}

static bool read_field(Reader *reader, Span key, Record *record) {
    if (equals(key, SPAN("messages")))
        return read_messages(reader, record);
    if (equals(key, SPAN("id"))) {
        if (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9')
            return record->has_id = read_integer(reader, &record->id);
        return read_label(reader, &record->id, &record->has_id);
    }
    if (equals(key, SPAN("source")))
        return read_label(reader, &record->source, &record->has_source);
    if (equals(key, SPAN("model"))) {
        Span ignored;
        bool is_given;
        return read_label(reader, &ignored, &is_given);
    }
    if (equals(key, SPAN("finish_reason")))
        return take_word(reader, SPAN("null")) || (record->has_stop = take_word(reader, SPAN("\"stop\"")));
    if (equals(key, SPAN("output_tokens"))) {
        Span digits;
        if (take_word(reader, SPAN("null")))
            return true;
        if (!read_integer(reader, &digits))
            return false;
        record->output_tokens = 0;
        for (Py_ssize_t i = 0; i < digits.size; i++)
            record->output_tokens = record->output_tokens * 10 + (digits.start[i] - '0');
        return true;
    }
    if (equals(key, SPAN("chat_template_kwargs")))
        return read_thinking(reader, &record->thinking);
    if (equals(key, SPAN("tools")) || equals(key, SPAN("conversations")) || equals(key, SPAN("prompt_token_ids")) ||
        equals(key, SPAN("output_token_ids")))
        return take_word(reader, SPAN("null"));
    return skip_value(reader, 0);
}

static bool read_record(Reader *reader, Record *record) {
    Keys keys = {.count = 0};
    Span key;
    record->num_messages = 0;
    record->has_id = record->has_source = record->has_stop = false;
    record->output_tokens = -1;
    record->thinking = 'n';
    if (reader->at == reader->end || *reader->at++ != '{')
        return false;
    do {
        if (!read_new_key(reader, &keys, &key) || !read_field(reader, key, record))
            return false;
    } while (take(reader, ','));
    if (!take(reader, '}') || record->num_messages == 0)
        return false;
    skip_space(reader);
    return reader->at == reader->end;
}

/* ---- Rows ---- */

enum { PROMPT, RESPONSE, ID, SOURCE, FINISH_REASON, OUTPUT_TOKENS, IS_THINKING_ONLY, RESPONSE_HEAD, FILE_NAME, LINE,
       BYTE_OFFSET, DATA, NUM_FIELDS };

static PyTypeObject *PlainRow_Type;
static PyStructSequence_Field ROW_FIELDS[] = {
    {"prompt", "text that the server prefilled"},
    {"response", "text that the target sampled, its end-of-turn token included"},
    {"id", "the record's id, None if it has none"},
    {"source", "where the prompt came from, None if the record doesn't say"},
    {"finish_reason", "stop, None if the record doesn't say"},
    {"output_tokens", "as the server counted them, None if the record doesn't say"},
    {"is_thinking_only", "whether there is a trace and no answer"},
    {"response_head", "trace and answer as far as statistics look at them, None where most letters are Latin beyond doubt"},
    {"file", "name of the file"},
    {"line", "number of the line, from 1"},
    {"byte_offset", "of the line in the decompressed file"},
    {"data", "the line, of a row now and then, and where white space that was trimmed may have been sampled"},
    {NULL, NULL},
};
static PyStructSequence_Desc ROW_DESCRIPTION = {"dflash.data._plain_rows.PlainRow", "A record's row before encoding.",
                                                ROW_FIELDS, NUM_FIELDS};

typedef struct {
    PyObject_HEAD
    Program *programs;
    Py_ssize_t num_programs;
    PyObject *kept;     /* list of what the programs point into */
    PyObject *controls; /* tuple of bytes: what control tokens begin with */
    Py_ssize_t max_prompt_characters, script_characters;
    Py_ssize_t lines_since_check;
    bool is_busy; /* a finalizer that runs meanwhile must not move the buffers */
    char *arena, *scratch;
    Py_ssize_t arena_size, scratch_size;
    PyObject *stop;
} Planner;

/* Where a line lies. */
typedef struct {
    Span text;
    PyObject *file;
    Py_ssize_t number, byte_offset;
} Line;

/* The first characters of a text, at most `limit`; takes their number off the limit. */
static Span take_head(Span text, Py_ssize_t *limit) {
    const char *at = text.start, *end = text.start + text.size;
    while (at < end && *limit > 0) {
        if (end - at >= 8 && *limit >= 8 && !(load8(at) & HIGHS)) {
            at += 8;
            *limit -= 8;
            continue;
        }
        at++;
        while (at < end && is_continuation(*at))
            at++;
        --*limit;
    }
    return (Span){text.start, at - text.start};
}

static Py_ssize_t count_not_ascii(Span text) {
    Py_ssize_t count = 0;
    const char *at = text.start, *end = text.start + text.size;
    while (at < end) {
        if (end - at >= 8 && !(load8(at) & HIGHS)) {
            at += 8;
            continue;
        }
        count += ((uint8_t)*at & 0xC0) == 0xC0;
        at++;
    }
    return count;
}

/* Whether two texts together have more ASCII letters than `count`. */
static bool has_more_letters(const Span texts[2], Py_ssize_t count) {
    Py_ssize_t letters = 0;
    for (int part = 0; part < 2; part++)
        for (Py_ssize_t i = 0; i < texts[part].size; i++) {
            int folded = (uint8_t)texts[part].start[i] | 0x20;
            letters += folded >= 'a' && folded <= 'z';
            if (letters > count)
                return true;
        }
    return false;
}

static PyObject *decode(Span text) { return PyUnicode_DecodeUTF8(text.start, text.size, NULL); }

static PyObject *decode_both(const Span texts[2]) {
    PyObject *first = decode(texts[0]), *second = decode(texts[1]);
    PyObject *both = first && second ? PyUnicode_Concat(first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return both;
}

static bool is_white_at_an_end(Span text) {
    return strip(text, &WHITE_SPACE, true, true).size != text.size;
}

/* Whether a message's texts spell what a control token begins with; the general code then looks closer. */
static bool may_spell_control(const Planner *planner, const Message *message) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(planner->controls); i++) {
        PyObject *item = PyTuple_GET_ITEM(planner->controls, i);
        Span beginning = {PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item)};
        if (contains(message->content, beginning) || contains(message->trace, beginning))
            return true;
    }
    return false;
}

static const Program *find_program(const Planner *planner, const Record *record, Span *registers) {
    char shape[MAX_MESSAGES + 1] = {record->thinking};
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < record->num_messages; i++) {
        const Message *message = &record->messages[i];
        shape[1 + i] = message->kind;
        registers[count++] = message->content;
        if (message->kind == 'A') { /* templates get it under two names */
            registers[count++] = message->trace;
            registers[count++] = message->trace;
        }
    }
    for (Py_ssize_t i = 0; i < planner->num_programs; i++) {
        const Program *program = &planner->programs[i];
        if (equals(program->shape, (Span){shape, 1 + record->num_messages}) && program->num_texts == count &&
            run(program, registers))
            return program;
    }
    return NULL;
}

static PyObject *make_row(Planner *planner, const Record *record, const Program *program, const Span *registers,
                          const Line *line) {
    const Message *last = &record->messages[record->num_messages - 1];
    Py_ssize_t limit = planner->script_characters;
    Span trace_head = take_head(last->trace, &limit);
    Span heads[2] = {trace_head, take_head(last->content, &limit)};
    /* No script has more letters than there are characters outside ASCII, but Latin. */
    bool is_latin = has_more_letters(heads, count_not_ascii(heads[0]) + count_not_ascii(heads[1]));
    bool is_doubtful = record->output_tokens >= 0 && (is_white_at_an_end(last->trace) || is_white_at_an_end(last->content));
    bool is_checked = planner->lines_since_check >= LINES_PER_CHECK;
    PyObject *prompt = join(&program->prompt, registers, &planner->scratch, &planner->scratch_size);
    if (prompt == NULL)
        return NULL;
    if (PyUnicode_GET_LENGTH(prompt) > planner->max_prompt_characters) { /* it may not fit into the window */
        Py_DECREF(prompt);
        return NULL;
    }
    PyObject *response = join(&program->response, registers, &planner->scratch, &planner->scratch_size);
    PyObject *row = response == NULL ? NULL : PyStructSequence_New(PlainRow_Type);
    if (row == NULL) {
        Py_DECREF(prompt);
        Py_XDECREF(response);
        return NULL;
    }
    PyObject *fields[NUM_FIELDS] = {
        [PROMPT] = prompt,
        [RESPONSE] = response,
        [ID] = record->has_id ? decode(record->id) : Py_NewRef(Py_None),
        [SOURCE] = record->has_source ? decode(record->source) : Py_NewRef(Py_None),
        [FINISH_REASON] = Py_NewRef(record->has_stop ? planner->stop : Py_None),
        [OUTPUT_TOKENS] = record->output_tokens < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(record->output_tokens),
        [IS_THINKING_ONLY] = PyBool_FromLong(last->trace.size > 0 && is_blank(last->content)),
        [RESPONSE_HEAD] = is_latin ? Py_NewRef(Py_None) : decode_both(heads),
        [FILE_NAME] = Py_NewRef(line->file),
        [LINE] = PyLong_FromSsize_t(line->number),
        [BYTE_OFFSET] = PyLong_FromSsize_t(line->byte_offset),
        [DATA] = is_checked || is_doubtful ? PyBytes_FromStringAndSize(line->text.start, line->text.size) : Py_NewRef(Py_None),
    };
    bool is_whole = true;
    for (int i = 0; i < NUM_FIELDS; i++) {
        is_whole &= fields[i] != NULL;
        PyStructSequence_SetItem(row, i, fields[i]);
    }
    if (!is_whole)
        Py_CLEAR(row);
    else if (is_checked)
        planner->lines_since_check = 0;
    return row;
}

/* The row of a line; NULL without an exception where the general code has to look at it. */
static PyObject *plan_line(Planner *planner, const Line *line) {
    Record record;
    Span registers[MAX_REGISTERS];
    const char *start = line->text.start, *end = start + line->text.size;
    Reader reader = {start, end, planner->arena};
    if (!read_record(&reader, &record) || !is_utf8(start, end))
        return NULL;
    const Message *last = &record.messages[record.num_messages - 1];
    if ((is_blank(last->content) && is_blank(last->trace)) || may_spell_control(planner, last))
        return NULL;
    const Program *program = find_program(planner, &record, registers);
    if (program == NULL)
        return NULL;
    return make_row(planner, &record, program, registers, line);
}

/* ---- The Planner type ---- */

static PyObject *planner_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"controls", "max_prompt_characters", "script_characters", NULL};
    PyObject *controls;
    Py_ssize_t max_prompt_characters, script_characters;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!nn:Planner", names, &PyTuple_Type, &controls,
                                     &max_prompt_characters, &script_characters))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(controls); i++)
        if (!PyBytes_Check(PyTuple_GET_ITEM(controls, i)))
            return PyErr_Format(PyExc_TypeError, "controls: expected bytes, found %R", PyTuple_GET_ITEM(controls, i));
    Planner *self = (Planner *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->controls = Py_NewRef(controls);
    self->max_prompt_characters = max_prompt_characters;
    self->script_characters = script_characters;
    self->lines_since_check = LINES_PER_CHECK; /* the first row is checked */
    self->kept = PyList_New(0);
    self->stop = PyUnicode_InternFromString("stop");
    if (self->kept == NULL || self->stop == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void planner_dealloc(PyObject *object) {
    Planner *self = (Planner *)object;
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; i < self->num_programs; i++)
        free_program(&self->programs[i]);
    PyMem_Free(self->programs);
    PyMem_Free(self->arena);
    PyMem_Free(self->scratch);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->controls);
    Py_XDECREF(self->stop);
    type->tp_free(object);
    Py_DECREF(type);
}

/* A text's UTF-8, kept for the planner's life; a lone surrogate raises UnicodeEncodeError. */
static bool keep_text(Planner *self, PyObject *object, Span *text) {
    text->start = PyUnicode_AsUTF8AndSize(object, &text->size);
    return text->start != NULL && PyList_Append(self->kept, object) == 0;
}

static bool add_step(Planner *self, PyObject *item, Step *step, Py_ssize_t *num_registers) {
    const char *name;
    PyObject *argument, *expected;
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "expected a step as a tuple, found %R", item);
        return false;
    }
    if (!PyArg_ParseTuple(item, "snOO:step", &name, &step->source, &argument, &expected))
        return false;
    for (step->function = STRIP; step->function < NUM_FUNCTIONS; step->function++)
        if (strcmp(name, FUNCTION_NAMES[step->function]) == 0)
            break;
    bool is_cut_step = step->function <= RSTRIP;
    if (step->function == NUM_FUNCTIONS || step->source < 0 || step->source >= *num_registers ||
        is_cut_step != (expected == Py_None) || (!is_cut_step && !PyBool_Check(expected))) {
        PyErr_Format(PyExc_ValueError, "expected a step of a known function on an earlier register, found %R", item);
        return false;
    }
    step->expected = expected == Py_True;
    if (is_cut_step) {
        if (++*num_registers > MAX_REGISTERS) {
            PyErr_Format(PyExc_ValueError, "expected at most %d texts and cuts", MAX_REGISTERS);
            return false;
        }
        if (argument == Py_None)
            return true;
        if (!PyUnicode_Check(argument)) {
            PyErr_Format(PyExc_TypeError, "expected text to cut, found %R", argument);
            return false;
        }
        step->set.count = PyUnicode_GET_LENGTH(argument);
        step->set.chars = PyUnicode_AsUCS4Copy(argument);
        return step->set.chars != NULL;
    }
    return step->function == IS_TRUE || keep_text(self, argument, &step->argument);
}

static bool add_pieces(Planner *self, PyObject *items, Pieces *pieces, Py_ssize_t num_registers) {
    pieces->items = PyMem_Calloc((size_t)PyTuple_GET_SIZE(items) + 1, sizeof(Piece));
    if (pieces->items == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (; pieces->count < PyTuple_GET_SIZE(items); pieces->count++) {
        PyObject *item = PyTuple_GET_ITEM(items, pieces->count);
        Piece *piece = &pieces->items[pieces->count];
        piece->source = -1;
        if (PyUnicode_Check(item)) {
            if (!keep_text(self, item, &piece->literal))
                return false;
            continue;
        }
        piece->source = PyLong_AsSsize_t(item);
        if (piece->source < 0 || piece->source >= num_registers) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "expected a register below %zd, found %R", num_registers, item);
            return false;
        }
    }
    return true;
}

static bool fill_program(Planner *self, Program *program, PyObject *steps, PyObject *prompt, PyObject *response) {
    Py_ssize_t num_registers = program->num_texts;
    if (num_registers < 0 || num_registers > MAX_REGISTERS) {
        PyErr_Format(PyExc_ValueError, "expected at most %d texts, found %zd", MAX_REGISTERS, num_registers);
        return false;
    }
    program->steps = PyMem_Calloc((size_t)PyTuple_GET_SIZE(steps) + 1, sizeof(Step));
    if (program->steps == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
        program->num_steps++;
        if (!add_step(self, PyTuple_GET_ITEM(steps, i), &program->steps[i], &num_registers))
            return false;
    }
    return add_pieces(self, prompt, &program->prompt, num_registers) &&
           add_pieces(self, response, &program->response, num_registers);
}

PyDoc_STRVAR(add_doc, "add(shape, num_texts, steps, prompt, response)\n--\n\n"
                      "Plan records of a shape by a program, behind those that were added before.\n\n"
                      "shape is bytes: n, t or f for what chat_template_kwargs say of enable_thinking, then a letter a message:\n"
                      "s, d, u, t, a, or A for the assistant with a trace. A step is (function, register, argument, expected).\n"
                      "A piece is text or the number of a register.");

static bool refuse_when_busy(const Planner *self) {
    if (self->is_busy)
        PyErr_SetString(PyExc_RuntimeError, "this planner is at work: give each thread one of its own");
    return self->is_busy;
}

static PyObject *planner_add(PyObject *object, PyObject *arguments) {
    Planner *self = (Planner *)object;
    if (refuse_when_busy(self))
        return NULL;
    PyObject *shape, *steps, *prompt, *response;
    Program program = {0};
    if (!PyArg_ParseTuple(arguments, "SnO!O!O!:add", &shape, &program.num_texts, &PyTuple_Type, &steps, &PyTuple_Type, &prompt,
                          &PyTuple_Type, &response))
        return NULL;
    program.shape = (Span){PyBytes_AS_STRING(shape), PyBytes_GET_SIZE(shape)};
    if (PyList_Append(self->kept, shape) < 0)
        return NULL;
    Program *programs = PyMem_Realloc(self->programs, sizeof(Program) * (size_t)(self->num_programs + 1));
    if (programs == NULL)
        return PyErr_NoMemory();
    self->programs = programs;
    if (!fill_program(self, &program, steps, prompt, response)) {
        free_program(&program);
        return NULL;
    }
    programs[self->num_programs++] = program;
    Py_RETURN_NONE;
}

/* Room for a line's strings. */
static bool make_room(Planner *self, Py_ssize_t size) {
    if (size <= self->arena_size)
        return true;
    char *arena = PyMem_Realloc(self->arena, (size_t)size);
    if (arena == NULL) {
        PyErr_NoMemory();
        return false;
    }
    self->arena = arena;
    self->arena_size = size;
    return true;
}

/* Give back what one long line took. */
static void shrink(char **buffer, Py_ssize_t *size) {
    if (*size > KEPT_BYTES) {
        PyMem_Free(*buffer);
        *buffer = NULL;
        *size = 0;
    }
}

PyDoc_STRVAR(plan_doc, "plan(block, file, line, byte_offset)\n--\n\n"
                       "For each line of a block of whole lines: a PlainRow, or (start, end) in the block, newline not counted,\n"
                       "where the general code has to look at it.");

static PyObject *plan_block(Planner *self, PyObject *arguments) {
    const char *block;
    Py_ssize_t size, byte_offset;
    Line line = {.number = 0};
    if (!PyArg_ParseTuple(arguments, "y#Unn:plan", &block, &size, &line.file, &line.number, &byte_offset))
        return NULL;
    PyObject *result = PyList_New(0);
    if (result == NULL)
        return NULL;
    for (const char *at = block, *end = block + size; at < end; line.number++) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        const char *stop = newline == NULL ? end : newline;
        line.text = (Span){at, stop - at};
        line.byte_offset = byte_offset + (at - block);
        self->lines_since_check++;
        PyObject *row = make_room(self, line.text.size) ? plan_line(self, &line) : NULL;
        if (row == NULL && !PyErr_Occurred())
            row = Py_BuildValue("nn", at - block, stop - block);
        int failed = row == NULL ? -1 : PyList_Append(result, row);
        Py_XDECREF(row);
        if (failed) {
            Py_DECREF(result);
            return NULL;
        }
        at = stop + 1;
    }
    shrink(&self->arena, &self->arena_size);
    shrink(&self->scratch, &self->scratch_size);
    return result;
}

static PyObject *planner_plan(PyObject *object, PyObject *arguments) {
    Planner *self = (Planner *)object;
    if (refuse_when_busy(self))
        return NULL;
    self->is_busy = true;
    PyObject *result = plan_block(self, arguments);
    self->is_busy = false;
    return result;
}

static PyMethodDef PLANNER_METHODS[] = {
    {"add", planner_add, METH_VARARGS, add_doc},
    {"plan", planner_plan, METH_VARARGS, plan_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot PLANNER_SLOTS[] = {
    {Py_tp_doc, "Planner(controls, max_prompt_characters, script_characters)\n--\n\n"
                "Plans rows of plain records by the programs it was given."},
    {Py_tp_new, planner_new},
    {Py_tp_dealloc, planner_dealloc},
    {Py_tp_methods, PLANNER_METHODS},
    {0, NULL},
};

static PyType_Spec PLANNER_SPEC = {"dflash.data._plain_rows.Planner", sizeof(Planner), 0, Py_TPFLAGS_DEFAULT, PLANNER_SLOTS};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_plain_rows", "Plain records from JSON Lines to prompt and response.", -1,
                                    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__plain_rows(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module == NULL)
        return NULL;
    PyObject *planner = PyType_FromSpec(&PLANNER_SPEC);
    PlainRow_Type = PyStructSequence_NewType(&ROW_DESCRIPTION);
    if (planner == NULL || PlainRow_Type == NULL || PyModule_AddObjectRef(module, "Planner", planner) < 0 ||
        PyModule_AddObjectRef(module, "PlainRow", (PyObject *)PlainRow_Type) < 0 ||
        PyModule_AddIntMacro(module, MAX_MESSAGES) < 0 || PyModule_AddIntMacro(module, MAX_REGISTERS) < 0)
        Py_CLEAR(module);
    Py_XDECREF(planner);
    return module;
}
