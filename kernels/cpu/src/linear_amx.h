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

template <class T, class Store>
void multiply_tiles(const Rows& x, int first_row, int end_row, const uint32_t* panels, int64_t panel_words,
                    int64_t k_words, int panel, int end, const Store& store) {
    alignas(64) float sums[4][16][LANES];
    int configured = -1;
    const int64_t stride = x.stride * 4;
    for (int p = panel; p < end; p += 2) {
        const bool has_two = p + 1 < end;
        const uint32_t* first = panels + (p - panel) * panel_words;
        const uint32_t* second = has_two ? first + panel_words : first;
        for (int row = first_row; row < end_row; row += 32) {
            int rows0 = std::min(16, end_row - row), rows1 = std::min(16, std::max(0, end_row - row - 16));
            if (configured != rows0 + rows1) configure_tiles(rows0, rows1);
            configured = rows0 + rows1;
            const uint32_t* x0 = x.row(row);
            const uint32_t* x1 = x.row(rows1 ? row + 16 : row);
            _tile_zero(0);
            _tile_zero(1);
            if (rows1) {
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t k = 0; k < k_words; k += 16) {
                    _tile_loadd(4, x0 + k, stride);
                    _tile_loadd(6, first + k * LANES, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, second + k * LANES, 64);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_loadd(5, x1 + k, stride);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                _tile_stored(2, sums[2], 64);
                _tile_stored(3, sums[3], 64);
            } else {
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
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            for (int r = 0; r < rows0 + rows1; r++) {
                int half = r / 16 * 2;
                f32x16 values[2] = {load<f32x16>(sums[half][r % 16]), load<f32x16>(sums[half + 1][r % 16])};
                if (has_two)
                    store.template emit<2>(row + r, p, values);
                else if constexpr (!Store::PAIRS)
                    store.template emit<1>(row + r, p, {values[0]});
            }
        }
    }
    _tile_release();
}
