// The same products in AMX tiles: 32 rows by 2 panels at a time, 32 inputs a tile.
// Included by linear.h where the compiler has AMX.

constexpr bool HAS_AMX = true;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0-3: sums of rows (0, 1) by panels (0, 1); 4, 5: x; 6, 7: weights.
inline void configure_tiles(int rows0, int rows1) {
    TileConfig config;
    const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = uint8_t(rows[tile] ? rows[tile] : 1);
        config.bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
}

// Inputs of a product whose sums are kept in memory meanwhile: 32 rows and two panels of so many fit the first cache,
// and the panels stay there for all rows. With all 576 inputs of SmolLM2 at once 1,600 GFLOP/s a core of a Xeon 6
// (2026-12), with 288 of them 2,400, with 256 2,150 and with 192 2,000.
constexpr int64_t CHUNK_WORDS = 9 * 16;

struct TileSums {
    alignas(64) float values[4][16][LANES];  // of rows (0, 1) by panels (0, 1)
};

// Lines of every 32 inputs by two panels, [first, end) of 32, that are fetched for the panels after these: all rows of
// a block together fetch them all. Without this, products of 256 rows took a fifth longer (Xeon 6, 2026-12).
struct Ahead {
    int64_t words;  // from a panel to that which takes its place
    int first, end;
};

// Up to 32 rows by two panels. Tiles must be configured for their numbers.
inline void multiply_tile(const uint32_t* x0, const uint32_t* x1, int64_t stride, const uint32_t* first,
                          const uint32_t* second, int64_t k_words, Ahead ahead, TileSums& sums) {
    for (int64_t k = 0; k < k_words; k += 16) {
        for (int line = ahead.first; line < ahead.end; line++)
            __builtin_prefetch((line < 16 ? first : second) + ahead.words + (k + line % 16) * LANES, 0, 2);
        _tile_loadd(4, x0 + k, stride);
        _tile_loadd(6, first + k * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + k * LANES, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x1 + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums.values[0], 64);
    _tile_stored(1, sums.values[1], 64);
    _tile_stored(2, sums.values[2], 64);
    _tile_stored(3, sums.values[3], 64);
}

// Up to 16 rows.
inline void multiply_half_tile(const uint32_t* x0, int64_t stride, const uint32_t* first, const uint32_t* second,
                               int64_t k_words, TileSums& sums) {
    for (int64_t k = 0; k < k_words; k += 16) {
        for (int line = 0; line < 16; line++) {
            __builtin_prefetch(first + (k + line) * LANES + AHEAD_WORDS, 0, 2);
            __builtin_prefetch(second + (k + line) * LANES + AHEAD_WORDS, 0, 2);
        }
        _tile_loadd(4, x0 + k, stride);
        _tile_loadd(6, first + k * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + k * LANES, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums.values[0], 64);
    _tile_stored(1, sums.values[1], 64);
}

inline void load_sums(const TileSums& sums) {
    _tile_loadd(0, sums.values[0], 64);
    _tile_loadd(1, sums.values[1], 64);
    _tile_loadd(2, sums.values[2], 64);
    _tile_loadd(3, sums.values[3], 64);
}

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

template <class T, class Store>
void multiply_tiles(const Rows& x, int first_row, int end_row, const uint32_t* panels, int64_t panel_words,
                    int64_t k_words, int panel, int end, const Store& store) {
    TileSums sums[MAX_BLOCK_ROWS / 32];
    const int num_chunks = end_row - first_row <= 32 ? 1 : int((k_words + CHUNK_WORDS - 1) / CHUNK_WORDS);
    const int64_t chunk = round_up((k_words + num_chunks - 1) / num_chunks, 16), stride = x.stride * 4;
    const int num_blocks = (end_row - first_row + 31) / 32;
    int configured = -1;
    for (int p = panel; p < end; p += 2) {
        const bool has_two = p + 1 < end;
        const uint32_t* first = panels + (p - panel) * panel_words;
        const uint32_t* second = has_two ? first + panel_words : first;
        for (int64_t k = 0; k < k_words; k += chunk)
            for (int row = first_row; row < end_row; row += 32) {
                int rows0 = std::min(16, end_row - row), rows1 = std::min(16, std::max(0, end_row - row - 16));
                if (configured != rows0 + rows1) configure_tiles(rows0, rows1);
                configured = rows0 + rows1;
                TileSums& to = sums[(row - first_row) / 32];
                if (k == 0)
                    zero_sums();
                else
                    load_sums(to);
                const uint32_t *w0 = first + k * LANES, *w1 = second + k * LANES;
                const int64_t count = std::min(chunk, k_words - k);
                const int block = (row - first_row) / 32;
                const Ahead ahead{2 * panel_words, block * 32 / num_blocks, (block + 1) * 32 / num_blocks};
                if (rows1)
                    multiply_tile(x.row(row) + k, x.row(row + 16) + k, stride, w0, w1, count, ahead, to);
                else
                    multiply_half_tile(x.row(row) + k, stride, w0, w1, count, to);
                if (k + count < k_words) continue;
                for (int r = 0; r < rows0 + rows1; r++) {
                    int half = r / 16 * 2;
                    f32x16 values[2] = {load<f32x16>(to.values[half][r % 16]),
                                        load<f32x16>(to.values[half + 1][r % 16])};
                    if (has_two)
                        store.template emit<2>(row + r, p, values);
                    else if constexpr (!Store::PAIRS)
                        store.template emit<1>(row + r, p, {values[0]});
                }
            }
    }
    _tile_release();
}
