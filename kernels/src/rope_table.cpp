// The process-wide store of rotary tables.
#include "rope_table.h"

#include <list>

namespace mantou {

std::shared_ptr<RopeTable> RopeTable::shared(std::vector<float> frequencies, float scale) {
  static std::mutex mutex;
  static std::list<std::shared_ptr<RopeTable>> tables;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto it = tables.begin(); it != tables.end(); ++it)
    if ((*it)->scale_ == scale && (*it)->frequencies_ == frequencies) {
      tables.splice(tables.begin(), tables, it);
      return tables.front();
    }
  tables.push_front(std::make_shared<RopeTable>(std::move(frequencies), scale));
  if (tables.size() > 32) tables.pop_back();
  return tables.front();
}

std::vector<float> RopeTable::from_periods(const float* periods, int half) {
  std::vector<float> f(half);
  for (int i = 0; i < half; ++i) f[i] = 1.0f / periods[i];
  return f;
}

}  // namespace mantou
