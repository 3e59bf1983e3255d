// Loops in the host's threads.
#pragma once

#include "abi.h"

namespace hfp {

// Calls f(i) for i in [0, count), in up to `count` threads at once.
template <class F>
void parallel(const hfp_threads& threads, int64_t count, const F& f) {
  const auto run = [](int64_t begin, int64_t end, void* context) {
    for (int64_t i = begin; i < end; i++) (*static_cast<const F*>(context))(i);
  };
  void* context = const_cast<F*>(&f);
  if (count <= 1 || !threads.parallel_for)
    run(0, count, context);
  else
    threads.parallel_for(0, count, 1, run, context);
}

}  // namespace hfp
