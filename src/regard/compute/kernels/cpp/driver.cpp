// Cuts a call into pieces: a block of rows of one key head, against all keys or some chunks of them.
// Every cut gives the same bytes, so how to cut is a question of speed alone.
#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <thread>
#include <tuple>
#include <vector>

#include "crew.hpp"

namespace regard {
namespace {

// Multiply-adds below which waking another thread costs more than it brings (about 50 µs).
constexpr double kWorthAThread = 2e6;
constexpr double kPairsOfAThread = 1e5;  // the same for pairs that are turned

// Rows of a block: enough to use keys well, and the same number of blocks for every thread.
int64_t rows_of_a_piece(const Target& target, int64_t rows, int64_t heads, int threads) {
    constexpr int64_t kPieces = 16, kTiles = 6;
    const int64_t tile = target.rows_per_tile,
                  shortest = (rows + kTiles * tile - 1) / (kTiles * tile);
    int64_t blocks = (rows + target.rows_per_task - 1) / target.rows_per_task;
    if (threads > 1) {
        blocks = std::max(blocks, (kPieces * threads + heads - 1) / heads);
        while (blocks * heads % threads && blocks * heads < 4 * kPieces * threads) blocks++;
        blocks = std::min(blocks, std::max<int64_t>(shortest, 1));
    }
    return ((rows + blocks - 1) / blocks + tile - 1) / tile * tile;
}

// How a call is cut.
struct Plan {
    int threads;
    int64_t block_rows, blocks;  // rows of a block, and blocks of a key head
    int64_t ranges, range;  // parts that the keys of a block are cut into, and chunks of each
    bool shared;  // the blocks of a key head share its packed keys
    // In bytes: of a thread, a key head, a block; of a thread's turned queries, a turned key head.
    size_t scratch_size, packed_size, partial_size, queries_size, keys_size;
    // Every thread begins with a share of key heads that stays in its own cache, then helps others.
    int64_t tasks, shares, tasks_each;  // blocks of the call; shares; pieces of each share
};

Plan plan_of(const Request& q, const Target& target, int threads, const Turns* turns) {
    const Kernel& kernel = kernel_of(q, target);
    const int64_t rows = q.H / q.G * q.L, heads = q.B * q.G, chunks = q.chunks();
    const double work = double(q.B) * double(q.H) * double(q.L) * double(q.S) * double(q.D + q.E);
    Plan plan{};
    threads = int(std::min<double>(threads, 1 + work / kWorthAThread));
    plan.threads = threads = std::clamp(threads, 1, kMostThreads);
    plan.block_rows = rows_of_a_piece(target, rows, heads, threads);
    plan.blocks = (rows + plan.block_rows - 1) / plan.block_rows;
    plan.tasks = heads * plan.blocks;
    plan.shared = plan.blocks > 1;
    // With few pieces of work and many keys, keys are split over threads too, if the states of all
    // chunks fit the memory that threads keep.
    const size_t most = kKept * size_t(threads) / size_t(plan.tasks);
    plan.ranges = 1;
    if (threads > 1 && plan.tasks < 2 * threads && chunks > 1 && !q.is_part() &&
        kernel.partial_bytes(q, plan.block_rows, chunks) <= most)
        plan.ranges = std::min(chunks, (4 * threads + plan.tasks - 1) / plan.tasks);
    plan.range = (chunks + plan.ranges - 1) / plan.ranges;
    if (chunks) plan.ranges = (chunks + plan.range - 1) / plan.range;
    plan.scratch_size = whole_lines(kernel.scratch_bytes(q));
    if (plan.shared) plan.packed_size = whole_lines(kernel.packed_bytes(q));
    if (turns) {
        plan.queries_size = whole_lines(size_t(plan.block_rows * q.query.row));
        plan.keys_size = whole_lines(size_t(q.S * q.key.row));
    }
    if (plan.ranges > 1) plan.partial_size = kernel.partial_bytes(q, plan.block_rows, chunks);
    plan.shares = std::gcd(heads, int64_t(threads));
    plan.tasks_each = heads / plan.shares * plan.blocks * plan.ranges;
    return plan;
}

// One attempt at a call, by threads that take pieces of work one after the other.
class Attempt {
  public:
    Attempt(const Request& q, const Target& target, const Plan& plan, const Turns* turns,
            Buffers& buffers, const std::function<bool()>& interrupted)
        : q_(q), target_(target), kernel_(kernel_of(q, target)), plan_(plan), turns_(turns),
          crew_(plan.threads, interrupted) {
        if (plan.shared || turns) find_shared_heads();
        const size_t heads = first_of_.size() * size_t(q.G), shares = size_t(plan.shares);
        const size_t counters = shares + heads + (plan.ranges > 1 ? size_t(plan.tasks) : 0);
        scratch_ = buffers.scratch.of(plan.scratch_size + plan.queries_size, size_t(plan.threads));
        if (turns) take_turned_heads(buffers.turned.of(plan.keys_size, heads));
        if (plan.shared) packed_ = buffers.packed.of(plan.packed_size, heads);
        if (plan.ranges > 1) partial_ = buffers.partial.of(plan.partial_size, size_t(plan.tasks));
        share_ = reinterpret_cast<Counter*>(buffers.counters.of(counters, sizeof(Counter)));
        packing_ = share_ + shares;
        parts_ = packing_ + heads;
        for (size_t n = 0; n < counters; n++) new (share_ + n) Counter;
    }

    Ending run() {
        return crew_.run(q_, [this](const Request& mine, int thread) { work_on(mine, thread); });
    }

  private:
    // Key heads that broadcast along the batch are turned and packed once.
    void find_shared_heads() {
        std::map<std::tuple<int64_t, int64_t, int64_t>, int64_t> known;
        const Array& keys = turns_ ? turns_->key.rows : q_.key;
        for (int64_t b = 0; b < q_.B; b++) {
            const int64_t angles = turns_ && turns_->key.apart ? b : 0;
            const auto place = std::make_tuple(keys.batch[b], q_.value.batch[b], angles);
            const auto found = known.emplace(place, int64_t(first_of_.size()));
            if (found.second) first_of_.push_back(b);
            set_of_.push_back(found.first->second);
        }
    }

    // The keys are read from the heads that are turned into this memory.
    void take_turned_heads(char* turned) {
        q_.key.data = turned;
        q_.key.head = int64_t(plan_.keys_size);
        for (int64_t set : set_of_) places_.push_back(set * q_.G * q_.key.head);
        q_.key.batch = places_.data();
        nowhere_.resize(size_t(q_.B));
        q_.query.batch = nowhere_.data();
    }

    void work_on(const Request& mine, int thread) {
        char* scratch = scratch_ + size_t(thread) * (plan_.scratch_size + plan_.queries_size);
        for (int64_t turn = 0; turn < plan_.shares; turn++) {
            const int64_t share = (thread + turn) % plan_.shares;
            for (int64_t n; !crew_.stopped() && (n = share_[share].next++) < plan_.tasks_each;)
                attend_piece(mine, share * plan_.tasks_each + n, scratch);
        }
    }

    void attend_piece(Request q, int64_t number, char* scratch) {
        // The longest blocks of a head first: under a causal mask these are the last rows.
        const int64_t block = plan_.blocks - 1 - number / plan_.ranges % plan_.blocks;
        const int64_t part = number % plan_.ranges, head = number / plan_.ranges / plan_.blocks;
        const int64_t first = block * plan_.block_rows;
        const int64_t last = std::min(q.H / q.G * q.L, first + plan_.block_rows);
        const Piece piece = {head / q.G, head % q.G, first, last};
        const char* keys = plan_.shared || turns_ ? ready_head(q, piece) : nullptr;
        if (crew_.stopped()) return;
        if (turns_) turn_queries(q, piece, scratch + plan_.scratch_size);
        const int64_t task = head * plan_.blocks + block;
        char* partial = partial_ ? partial_ + size_t(task) * plan_.partial_size : nullptr;
        kernel_.attend(q, piece, part * plan_.range, std::min(q.chunks(), (part + 1) * plan_.range),
                       keys, scratch, partial);
        if (partial && ++parts_[task].done == plan_.ranges && !crew_.stopped())
            kernel_.merge(q, piece, partial, scratch);
    }

    // The rows of a piece, turned into a thread's memory; the request reads them there.
    void turn_queries(Request& q, const Piece& piece, char* to) {
        const int64_t group = q.H / q.G, row = q.query.row;
        for (int64_t r = piece.first, end; r < piece.last; r = end) {
            const int64_t i = r % q.L;
            end = std::min(piece.last, r - i + q.L);
            target_.turn(turns_->query, piece.b, piece.g * group + r / q.L, i, i + end - r,
                         to + (r - piece.first) * row);
        }
        q.query.data = to - (piece.g * group * q.L + piece.first) * row;
    }

    // The keys of a head, turned and packed: the first thread that needs them begins, others join in.
    char* ready_head(const Request& q, const Piece& piece) {
        const int64_t set = set_of_[size_t(piece.b)], head = set * q.G + piece.g;
        const int64_t chunks = q.chunks();
        char* keys = plan_.shared ? packed_ + size_t(head) * plan_.packed_size : nullptr;
        Counter& state = packing_[head];
        for (int64_t n; !crew_.stopped() && (n = state.next++) < chunks; state.done++) {
            const int64_t b = first_of_[size_t(set)], first = n * kChunk;
            if (turns_)
                target_.turn(turns_->key, b, piece.g, first, std::min(q.S, first + kChunk),
                             const_cast<char*>(q.key.at(b, piece.g, first)));
            if (keys) kernel_.pack(q, b, piece.g, n, keys);
            q.stopped(q.state);
        }
        while (!crew_.stopped() && state.done < chunks) std::this_thread::yield();
        return keys;
    }

    Request q_;
    const Target& target_;
    const Kernel& kernel_;
    const Plan& plan_;
    const Turns* turns_;  // or nullptr
    Crew crew_;
    std::vector<int64_t> set_of_, first_of_;  // (B): its packed set; the first of each set
    std::vector<int64_t> places_, nowhere_;  // (B): of turned keys, in bytes; zeros
    char *scratch_ = nullptr, *packed_ = nullptr, *partial_ = nullptr;
    Counter *share_, *packing_, *parts_;  // per share; per packed head; per block
};

Ending attempt(const Request& q, const Target& target, int threads,
               const std::function<bool()>& interrupted, const Turns* turns) {
    thread_local Buffers kept;
    const Nested call;
    Buffers own;
    Buffers& buffers = call.inner() ? own : kept;
    const Plan plan = plan_of(q, target, call.inner() ? 1 : threads, turns);
    const Ending ending = Attempt(q, target, plan, turns, buffers, interrupted).run();
    for (Buffer* one : {&buffers.packed, &buffers.partial, &buffers.counters, &buffers.turned})
        one->trim(kKept);
    buffers.scratch.trim(kKept * size_t(plan.threads));
    return ending;
}

}  // namespace

// The least and the greatest segment of every kSpan keys.
static std::vector<int64_t> spans_of(const Request& q, const int64_t* keys) {
    std::vector<int64_t> spans;
    for (int64_t b = 0; b < q.B; b++)
        for (int64_t j = 0; j < q.S; j += kSpan) {
            const int64_t* first = keys + b * q.S + j;
            const auto span = std::minmax_element(first, first + std::min(kSpan, q.S - j));
            spans.insert(spans.end(), {*span.first, *span.second});
        }
    return spans;
}

void take_program(Request& q, std::vector<Node>& program,
                  std::deque<std::vector<int64_t>>& tables) {
    int32_t depth = 0;
    q.conjunction = true;
    for (Node& node : program) {
        if (node.rule == Rule::segments) {
            tables.push_back(spans_of(q, node.keys));
            node.spans = tables.back().data();
        }
        q.conjunction &= node.rule != Rule::any && node.rule != Rule::negate;
        if (node.rule == Rule::all || node.rule == Rule::any) depth--;
        else if (node.rule != Rule::negate) depth++;
        q.program_depth = std::max(q.program_depth, depth);
    }
    q.program = program.empty() ? nullptr : program.data();
    q.program_size = int32_t(program.size());
}

// An array of turned rows, all contiguous; where they are is not known yet.
static Array turned_rows(const Array& rows, int64_t count, int64_t columns) {
    const int64_t one = size_of(rows.kind);
    return {nullptr, rows.batch, count * columns * one, columns * one, one, rows.kind};
}

void turn_rows(const std::vector<Turn>& turns, const Target& target, int threads) {
    const Nested call;
    std::vector<int64_t> ends;  // the number of pieces up to the end of each
    int64_t pieces = 0;
    double numbers = 0;
    for (const Turn& turn : turns) {
        ends.push_back(pieces += turn.pieces());
        numbers += double(turn.B) * double(turn.H) * double(turn.L) * double(turn.pairs);
    }
    threads = int(std::min<double>(call.inner() ? 1 : threads, 1 + numbers / kPairsOfAThread));
    std::atomic<int64_t> next{0};
    const auto work = [&](int) {
        const DefaultArithmetic arithmetic;
        for (int64_t n; (n = next++) < pieces;) {
            const auto end = std::upper_bound(ends.begin(), ends.end(), n);
            const Turn& t = turns[size_t(end - ends.begin())];
            const int64_t piece = n - (*end - t.pieces()), blocks = t.pieces() / t.B;
            const int64_t b = piece / blocks, first = piece % blocks * kTurned;
            const int64_t last = std::min(t.L, first + kTurned), row = t.D * size_of(t.kind);
            for (int64_t h = 0; h < t.H; h++)  // all share angles
                target.turn(t, b, h, first, last, t.output + ((b * t.H + h) * t.L + first) * row);
        }
    };
    run_on_threads(threads, work, nullptr);
}

bool answer(Request request, const Target& target, int threads,
            const std::function<bool()>& interrupted, const Turns* turns) {
    const DefaultArithmetic arithmetic;
    request.extended_range_row = extended_range_row;
    request.dots = &kernel_of(request, target) == &target.kernels[2];
    if (request.B == 0 || request.G == 0 || request.H / request.G * request.L == 0) return true;
    if (turns) {
        request.query = turned_rows(request.query, request.L, request.D);
        request.key = turned_rows(request.key, request.S, request.D);
    }
    return until_complete([&] { return attempt(request, target, threads, interrupted, turns); });
}

}  // namespace regard
