-- Read what waits in a result stream without its rows, teach the ledger what it has lost of it, and drop
-- what the store has already.
-- Works when Redis is full.
--
-- ARGV: operation, run, uid, Redis run_id, token, partition, then the operation's own.
-- Returns {'unknown'}, {'restarted'}, {'lost'} (see prelude), or the operation's reply.

begin_even_when_full()
local operation, run, uid, run_id, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local why = maintenance_refused(run, uid, run_id, token)
if why then return {why} end

local stream = results_key(run, tonumber(ARGV[6]))
local bits = tonumber(redis.call('HGET', run_key(run), 'bits'))
local STATE = {c = 'd', f = 'f', x = 'c'}
local COUNTER = {d = 'completed', f = 'failed', c = 'cancelled'}

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

-- A failed job goes into RQ's registry in this same call; its request follows from the store.
local function end_job(hex, state, timeout_s)
  release(run, hex)
  redis.call('ZREM', parked_key(run), hex)
  if state == 'f' then
    redis.call('HSET', rq_job(hex), 'data', job_data(hex), 'origin', run, 'status', 'failed',
      'timeout', timeout_s)
    redis.call('PERSIST', rq_job(hex))
    redis.call('ZADD', rq_failed(run), FAR_FUTURE_S, hex)
  else
    redis.call('ZREM', rq_failed(run), hex)
    redis.call('UNLINK', rq_job(hex))
  end
end

-- What waits for a sink has ended, whatever the ledger has lost: queued again, it would end twice. A
-- finish sets both in one step, so this finds something only after a loss of single keys.
local function learn(f, timeout_s)
  local hex, try, state = to_hex(f.k), tonumber(f.t), STATE[f.o]
  local old = ledger_get(run, f.k, hex, bits)
  if old then
    local wins = state == 'd' or try > old.try or (is_queued(old.state) and try == old.try)
    if old.state == 'd' or old.fingerprint ~= f.f or not wins then return end
    if old.state == 'u' then count(run, 'unfed', -1) end
    if COUNTER[old.state] then count(run, COUNTER[old.state], -1) end
  else
    count(run, 'total', 1)
  end
  ledger_set(run, f.k, hex, bits, f.f, state, try)
  count(run, COUNTER[state], 1)
  end_job(hex, state, timeout_s)
end

-- ARGV: job timeout (s), id to begin at, count. Entries that name no key are passed over.
-- Returns {'ok', last id that was looked at or '', then fours: id, key, outcome, try}.
local function index()
  local found = redis.call('XRANGE', stream, ARGV[8], '+', 'COUNT', tonumber(ARGV[9]))
  local reply = {'ok', found[1] and found[#found][1] or ''}
  for _, entry in ipairs(found) do
    local f = fields_of(entry)
    if f.k and #f.k == 16 and STATE[f.o] and tonumber(f.t) then
      if f.f and #f.f == 8 then learn(f, ARGV[7]) end
      reply[#reply + 1] = entry[1]
      reply[#reply + 1] = f.k
      reply[#reply + 1] = f.o
      reply[#reply + 1] = f.t
    end
  end
  return reply
end

-- The key's state came from the entry that goes: let it be what the record says that stays.
local function put_in_its_place(raw, hex, old, fields, record)
  local fingerprint, outcome, try, input, output = struct.unpack('>c8c1I4I8I8', record, 17)
  local state = STATE[outcome]
  if fields.o == 'c' then
    count(run, 'input_tokens', -tonumber(fields.i))
    count(run, 'output_tokens', -tonumber(fields.n))
  end
  if outcome == 'c' then
    count(run, 'input_tokens', input)
    count(run, 'output_tokens', output)
  end
  ledger_set(run, raw, hex, bits, fingerprint, state, try)
  if state == old.state then return end
  count(run, COUNTER[old.state], -1)
  count(run, COUNTER[state], 1)
  end_job(hex, state, ARGV[7])
end

-- ARGV: job timeout (s), then pairs: entry id, the record (45 bytes, as `teach` takes it) that is
-- the key's current one over the store and what remains in the stream.
-- Returns {'ok', entries dropped}.
local function drop()
  local dropped = 0
  for i = 8, #ARGV, 2 do
    local found = redis.call('XRANGE', stream, ARGV[i], ARGV[i])
    if found[1] then
      local fields, record = fields_of(found[1]), ARGV[i + 1]
      redis.call('XDEL', stream, ARGV[i])
      count(run, 'stream_bytes', -(#fields.r + 100))
      count(run, 'stream_entries', -1)
      local raw, hex = fields.k, to_hex(fields.k)
      local old = ledger_get(run, raw, hex, bits)
      if old and old.state == STATE[fields.o] and old.try == tonumber(fields.t) then
        put_in_its_place(raw, hex, old, fields, record)
      end
      dropped = dropped + 1
    end
  end
  return {'ok', dropped}
end

local operations = {index = index, drop = drop}
return operations[operation]()
