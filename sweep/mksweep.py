import pathlib,os
os.chdir('/tmp/nb/sweepsrc')
def sub(path, pairs):
    p=pathlib.Path(path); s=p.read_text()
    for a,b in pairs:
        assert s.count(a)>=1,(path,s.count(a),a)
        s=s.replace(a,b)
    p.write_text(s)
sub('layer_norm/config.h',[
('#include <cstdint>\n','''#include <cstdint>
#include <cstdlib>
namespace flash::layer_norm {
inline int knob(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : std::atoi(value);
}
}  // namespace flash::layer_norm
'''),
('inline int num_parts(int64_t rows, int threads, int multiprocessors) {','''inline int num_parts(int64_t rows, int threads, int multiprocessors) {
  if (const int parts = knob("LN_PARTS", 0)) return static_cast<int>(std::min<int64_t>(rows, parts));
  if (knob("LN_BLOCKS", 0) || knob("LN_ROUNDS", 0)) {
    const int64_t blocks = knob("LN_BLOCKS", blocks_at_once(threads)), at_once = int64_t{multiprocessors} * blocks;
    return static_cast<int>(std::min<int64_t>(rows, at_once * knob("LN_ROUNDS", 1)));
  }'''),
('''  return num_parts(rows, std::max(1, ceil_div(cols, 16)), multiprocessors);
''','''  if (knob("LN_PARTS", 0) || knob("LN_BLOCKS", 0) || knob("LN_ROUNDS", 0)) return static_cast<int>(std::min<int64_t>(rows, 64 * multiprocessors));
  return num_parts(rows, std::max(1, ceil_div(cols, 16)), multiprocessors) * 2;
'''),
('constexpr int warp_ring_bytes(int vecs, bool ragged) {\n  return kStages','constexpr int warp_ring_bytes(int vecs, bool ragged, int stages = kStages) {\n  return stages'),
('constexpr int ring_bytes(int threads, int vecs, bool ragged) { return threads / 32 * warp_ring_bytes(vecs, ragged); }',
 'constexpr int ring_bytes(int threads, int vecs, bool ragged, int stages = kStages) { return threads / 32 * warp_ring_bytes(vecs, ragged, stages); }'),
])
s=pathlib.Path('layer_norm/bwd.cuh')
sub('layer_norm/bwd.cuh',[
('bool kRagged_ = false, bool kTiled_ = false>\nstruct BwdConfig','bool kRagged_ = false, bool kTiled_ = false,\n          int kStages_ = 2, bool kHolds_ = true, int kThreads_ = 0, int kBlocks_ = 0>\nstruct BwdConfig'),
('  static constexpr bool kHoldsWeight = kExtent != Extent::kAll;','  static constexpr int kStages = kStages_;\n  static constexpr bool kHoldsWeight = kHolds_ && kExtent != Extent::kAll;'),
('  static constexpr int kThreads = max_bwd_threads(kVecs), kBlocks = blocks_at_once(kThreads);','  static constexpr int kThreads = kThreads_ ? kThreads_ : max_bwd_threads(kVecs);\n  static constexpr int kBlocks = kBlocks_ ? kBlocks_ : blocks_at_once(kThreads);'),
('  static constexpr int kVec = Config::kVec, kVecs = Config::kVecs;\n  enum Which','  static constexpr int kVec = Config::kVec, kVecs = Config::kVecs, kStages = Config::kStages;\n  enum Which'),
('thread_ / 32 * warp_ring_bytes(kVecs, Config::kRagged)','thread_ / 32 * warp_ring_bytes(kVecs, Config::kRagged, kStages)'),
('bwd_kernel(const __grid_constant__ BwdParams p) {\n','bwd_kernel(const __grid_constant__ BwdParams p) {\n  constexpr int kStages = Config::kStages;\n'),
('ring_bytes(shape.lanes, Config::kVecs, Config::kRagged)','ring_bytes(shape.lanes, Config::kVecs, Config::kRagged, Config::kStages)'),
('ring_bytes(threads, Config::kVecs, Config::kRagged)','ring_bytes(threads, Config::kVecs, Config::kRagged, Config::kStages)'),
])
sub('layer_norm/bwd.cu',[
('Config::kVecs, kSmallThreads,','Config::kVecs, knob("LN_THREADS", kSmallThreads),'),
('void bwd(const BwdParams& p, cudaStream_t stream) {\n','''#define COMBOS(V) \\
  COMBO(8, 2, 1, 80, V, 256, 3) COMBO(8, 3, 1, 80, V, 256, 3) COMBO(8, 2, 1, 128, V, 512, 1) COMBO(8, 3, 1, 128, V, 512, 1) \\
  COMBO(16, 2, 1, 128, V, kMost, kMostBlocks) COMBO(16, 3, 1, 128, V, kMost, kMostBlocks) \\
  COMBO(16, 2, 0, 128, V, kMost, kMostBlocks) COMBO(16, 3, 0, 128, V, kMost, kMostBlocks) \\
  COMBO(24, 2, 0, 128, V, 128, 4) COMBO(24, 3, 0, 128, V, 128, 4) COMBO(24, 2, 0, 168, V, 128, 3) \\
  COMBO(32, 2, 0, 128, V, 128, 4) COMBO(32, 3, 0, 128, V, 128, 4) COMBO(32, 2, 0, 168, V, 128, 3)

template <Types kTypes, Extent kExtent>
static bool run_swept(const BwdParams& p, cudaStream_t stream) {
  const int elements = knob("LN_EL", 0), stages = knob("LN_STAGES", 2), holds = knob("LN_HOLDS", elements <= 16), regs = knob("LN_REGS", 128);
  if (elements == 0) return false;
  constexpr int kVec = vec_of(kTypes), kMost = kVec == 8 ? 512 : 256, kMostBlocks = 512 / kMost;
#define COMBO(E, S, H, R, V, T, B) \\
  if (elements == E && stages == S && holds == H && regs == R) \\
    return run_shaped<BwdConfig<kTypes, kVec, E / kVec, kExtent, false, false, S, H, T, B>>(p, stream), true;
  COMBOS(0)
#undef COMBO
  throw std::invalid_argument("no such combination of LN_EL, LN_STAGES, LN_HOLDS and LN_REGS");
}

void bwd(const BwdParams& p, cudaStream_t stream) {
'''),
('  if (!holds_row<finish_kernel>(','''  if (!ragged && extent == Extent::kPlain && types == kBrain && run_swept<kBrain, Extent::kPlain>(p, stream)) return;
  if (!ragged && extent == Extent::kBranches && types == kBrain && run_swept<kBrain, Extent::kBranches>(p, stream)) return;
  if (!ragged && extent == Extent::kPlain && types == Types::kBFloat16Stream32 && run_swept<Types::kBFloat16Stream32, Extent::kPlain>(p, stream)) return;
  if (!ragged && extent == Extent::kBranches && types == Types::kBFloat16Stream32 && run_swept<Types::kBFloat16Stream32, Extent::kBranches>(p, stream)) return;
  if (!holds_row<finish_kernel>('''),
('#include <iterator>\n','#include <iterator>\n#include <stdexcept>\n'),
])
