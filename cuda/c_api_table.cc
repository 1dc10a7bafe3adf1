#include "c_api_table.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c_api_guard.h"
#include "sok/device_table.h"
#include "sok/initializer.h"

struct SokCudaTable {
  SokCudaTable(sok::TableConfig config, int64_t budget_bytes) : table(std::move(config), budget_bytes) {}
  sok::DeviceTable table;
};

struct SokCudaReading {
  sok::DeviceTable::Reading reading;
};

namespace {

using sok::Cuda;
using sok::DeviceScratch;
using sok::Guard;
using sok::GuardWith;

sok::DeviceTable* TableOf(SokCudaTable* table) {
  if (table == nullptr) throw sok::InvalidArgument("table must not be null.");
  return &table->table;
}

// GuardWith, for calls of a table.
template <class Body>
int OfTable(SokCudaContext* context, SokCudaTable* table, const Body& body) {
  return GuardWith(context, [&](const Cuda& cuda, DeviceScratch* scratch) { body(*TableOf(table), cuda, scratch); });
}

SokCudaRows RowsOf(const sok::DeviceRows& r) {
  return {const_cast<float**>(r.slabs), r.matrix, r.shift, r.mask, r.stride};
}

}  // namespace

int sok_cuda_table_create(const SokCudaTableConfig* config, int64_t budget_bytes, SokCudaTable** table) {
  return Guard([&] {
    sok::TableConfig c;
    c.name = config->name;
    c.dim = config->dim;
    c.capacity = config->capacity;
    c.hashed = config->hashed != 0;
    c.is_unsigned = config->is_unsigned != 0;
    c.world_size = static_cast<int>(config->world_size);
    c.rank = static_cast<int>(config->rank);
    c.owner = static_cast<int>(config->owner);
    c.num_keys = config->num_keys;
    c.initializer.kind = sok::ParseInitKind(config->initializer);
    c.initializer.a = config->a;
    c.initializer.b = config->b;
    c.initializer.seed = config->seed;
    c.initializer.bank_rows = config->bank_rows;
    if (config->bank != nullptr) c.initializer.bank.assign(config->bank, config->bank + config->bank_rows * c.dim);
    *table = new SokCudaTable(std::move(c), budget_bytes);
  });
}

void sok_cuda_table_destroy(SokCudaTable* table) { delete table; }

int sok_cuda_table_lookup(SokCudaContext* context, SokCudaTable* table, const uint64_t* keys, int64_t n, int64_t insert,
                          float* rows, int64_t* row_ids) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Lookup(cuda, scratch, keys, n, insert != 0, rows, row_ids);
  });
}

int sok_cuda_table_apply(SokCudaContext* context, SokCudaTable* table, const char* rule, const double* hyper,
                         int64_t hyper_size, int64_t step, const char* slot_set, const char* nonfinite,
                         float grad_scale, const int64_t* row_ids, const float* grads, int64_t n,
                         const int64_t* num_grads) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Apply(cuda, scratch, sok::MakeUpdateRule(rule, hyper, hyper_size, step), slot_set, sok::ParseNonfinite(nonfinite),
            grad_scale, row_ids, grads, n, num_grads);
  });
}

int sok_cuda_tables_lookup(SokCudaContext* context, const SokCudaAsked* asked, int64_t num_asked, int64_t insert) {
  return GuardWith(context, [&](const Cuda& cuda, DeviceScratch* scratch) {
    std::vector<sok::DeviceTable::Asked> all;
    for (int64_t k = 0; k < num_asked; ++k) {
      const SokCudaAsked& a = asked[k];
      all.push_back({TableOf(a.table), a.keys, a.n, a.rows, a.row_ids});
    }
    sok::DeviceTable::LookupGroup(cuda, scratch, all.data(), num_asked, insert != 0);
  });
}

int sok_cuda_tables_apply(SokCudaContext* context, const char* rule, const double* hyper, int64_t hyper_size,
                          int64_t step, const char* slot_set, const char* nonfinite, float grad_scale,
                          const SokCudaGradients* gradients, int64_t num_tables) {
  return GuardWith(context, [&](const Cuda& cuda, DeviceScratch* scratch) {
    std::vector<sok::DeviceTable::Gradients> all;
    for (int64_t t = 0; t < num_tables; ++t) {
      const SokCudaGradients& g = gradients[t];
      all.push_back({TableOf(g.table), g.row_ids, g.grads, g.n, g.num_grads});
    }
    sok::DeviceTable::ApplyGroup(cuda, scratch, sok::MakeUpdateRule(rule, hyper, hyper_size, step), slot_set,
                                 sok::ParseNonfinite(nonfinite), grad_scale, all.data(), num_tables);
  });
}

int sok_cuda_table_assign(SokCudaContext* context, SokCudaTable* table, const uint64_t* keys, const float* rows,
                          int64_t n) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Assign(cuda, scratch, keys, rows, n);
  });
}

int sok_cuda_table_assign_slots(SokCudaContext* context, SokCudaTable* table, const char* rule, const double* hyper,
                                int64_t hyper_size, int64_t step, const char* slot_set, const uint64_t* keys,
                                const float* slots, int64_t n, int64_t slot_floats) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    const sok::UpdateRule made = sok::MakeUpdateRule(rule, hyper, hyper_size, step);
    const int64_t expected = made.slot_floats(t.config().dim);
    if (slot_floats != expected) {
      throw sok::InvalidArgument(t.Label() + ": rule '" + rule + "' keeps " + std::to_string(expected) +
                                 " floats per row in its slots. Received: " + std::to_string(slot_floats) + ".");
    }
    t.AssignSlots(cuda, scratch, made, slot_set, keys, slots, n);
  });
}

int sok_cuda_table_erase(SokCudaContext* context, SokCudaTable* table, const uint64_t* keys, int64_t n) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Erase(cuda, scratch, keys, n);
  });
}

int sok_cuda_table_export(SokCudaContext* context, SokCudaTable* table, uint64_t* keys, int64_t* row_ids, int64_t n) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Export(cuda, scratch, keys, row_ids, n);
  });
}

int sok_cuda_table_weights(SokCudaContext* context, SokCudaTable* table, const int64_t* row_ids, int64_t n,
                           float* rows) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Weights(cuda, scratch, row_ids, n, rows);
  });
}

int sok_cuda_table_slots(SokCudaContext* context, SokCudaTable* table, const char* slot_set, const int64_t* row_ids,
                         int64_t n, float* slots) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch* scratch) {
    t.Slots(cuda, scratch, slot_set, row_ids, n, slots);
  });
}

int sok_cuda_table_reserve(SokCudaContext* context, SokCudaTable* table, int64_t n) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch*) { t.Reserve(cuda, n); });
}

int sok_cuda_table_read_begin(SokCudaContext* context, SokCudaTable* table, SokCudaRows* rows, int64_t* num_rows,
                              SokCudaReading** reading) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch*) {
    auto read = std::make_unique<SokCudaReading>(SokCudaReading{t.Read(cuda)});
    *rows = RowsOf(read->reading.rows);
    *num_rows = read->reading.num_rows;
    *reading = read.release();
  });
}

int sok_cuda_tables_read_begin(SokCudaContext* context, SokCudaTable* const* tables, int64_t num_tables,
                               SokCudaRows* rows, int64_t* num_rows, SokCudaReading** reading) {
  return GuardWith(context, [&](const Cuda& cuda, DeviceScratch*) {
    std::vector<sok::DeviceTable*> all;
    for (int64_t t = 0; t < num_tables; ++t) all.push_back(TableOf(tables[t]));
    const std::vector<sok::DeviceTable::Reading> readings = sok::DeviceTable::ReadGroup(cuda, all);
    auto read = std::make_unique<SokCudaReading>();
    for (size_t t = 0; t < readings.size(); ++t) {
      rows[t] = RowsOf(readings[t].rows);
      num_rows[t] = readings[t].num_rows;
      read->reading = readings[t];  // each holds all of them
    }
    *reading = read.release();
  });
}

void sok_cuda_table_read_end(SokCudaReading* reading) { delete reading; }

int sok_cuda_table_size_to_host(SokCudaContext* context, SokCudaTable* table, int64_t* size) {
  return OfTable(context, table,
                 [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch*) { *size = t.SizeToHost(cuda); });
}

int sok_cuda_table_check_to_host(SokCudaContext* context, SokCudaTable* table) {
  return OfTable(context, table,
                 [&](sok::DeviceTable& t, const Cuda& cuda, DeviceScratch*) { t.ThrowIfBadToHost(cuda); });
}

int sok_cuda_table_slot_floats(SokCudaContext* context, SokCudaTable* table, const char* slot_set, int64_t* floats) {
  return OfTable(context, table,
                 [&](sok::DeviceTable& t, const Cuda&, DeviceScratch*) { *floats = t.SlotFloats(slot_set); });
}

int sok_cuda_table_memory_bytes(SokCudaContext* context, SokCudaTable* table, int64_t* bytes) {
  return OfTable(context, table, [&](sok::DeviceTable& t, const Cuda&, DeviceScratch*) { *bytes = t.memory_bytes(); });
}

int sok_cuda_fill_rows(SokCudaContext* context, const char* initializer, float a, float b, uint64_t seed,
                       const float* bank, int64_t bank_rows, const uint64_t* keys, int64_t n, int64_t dim,
                       float* rows) {
  return GuardWith(context, [&](const Cuda& cuda, DeviceScratch*) {
    const sok::InitializerView view = {sok::ParseInitKind(initializer), a, b, seed, bank, bank_rows};
    sok::FillRows(cuda, view, keys, n, dim, rows);
  });
}
