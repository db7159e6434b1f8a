-- What every script shares: conversions, the ledger's layout, leases, the counters.
-- Times are milliseconds of Redis TIME; no client's clock decides anything.

local FAR_FUTURE_S = 4102444800
-- Members of RQ's started registry are scored with the year 2100, since any reader of its count
-- (`rq info` among them) fails or requeues what it thinks has expired.

local function to_hex(raw)
  local a, b, c, d = struct.unpack('>I4I4I4I4', raw)
  return string.format('%08x%08x%08x%08x', a, b, c, d)
end

local function is_job_id(text)
  return #text == 32 and not string.find(text, '[^0-9a-f]')
end

local function to_raw(hex)
  return struct.pack('>I4I4I4I4', tonumber(string.sub(hex, 1, 8), 16),
    tonumber(string.sub(hex, 9, 16), 16), tonumber(string.sub(hex, 17, 24), 16),
    tonumber(string.sub(hex, 25, 32), 16))
end

local function bucket_of(run, hex, bits)
  local number = math.floor(tonumber(string.sub(hex, 1, 8), 16) / 2 ^ (32 - bits))
  return ledger_stem(run) .. string.format('%x', number)
end

local function field_of(raw, bits)
  return string.sub(raw, math.floor(bits / 8) + 1)
end

-- A ledger value is fingerprint (8 bytes), state (1 byte), try (digits, nothing for the first).
local function ledger_entry(value)
  return {
    fingerprint = string.sub(value, 1, 8),
    state = string.sub(value, 9, 9),
    try = tonumber(string.sub(value, 10)) or 1,
  }
end

local function ledger_value(fingerprint, state, try)
  local number = tonumber(try)
  return fingerprint .. state .. (number > 1 and string.format('%d', number) or '')
end

-- Queued: its job is in Redis (q), or its request waits in inputs/ until there is room (u).
local function is_queued(state) return state == 'q' or state == 'u' end

local function ledger_get(run, raw, hex, bits)
  local value = redis.call('HGET', bucket_of(run, hex, bits), field_of(raw, bits))
  return value and ledger_entry(value) or nil
end

local function ledger_set(run, raw, hex, bits, fingerprint, state, try)
  redis.call('HSET', bucket_of(run, hex, bits), field_of(raw, bits),
    ledger_value(fingerprint, state, try))
end

-- The hex key of a field in bucket number `bucket`: whole bytes of the bucket, then the field.
local function hex_of(bucket, field, bits)
  local bytes = math.floor(bits / 8)
  local head = struct.pack('>I4', math.floor(bucket / 2 ^ (bits % 8)))
  return to_hex(string.sub(head, 5 - bytes) .. field)
end

local function partition_of(raw, partitions)
  if partitions == 1 then return 0 end
  local words, rest = {struct.unpack('>I4I4I4I4', raw)}, 0
  for i = 1, 4 do rest = (rest * 4294967296 + words[i]) % partitions end
  return rest
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Names what this server holds: its process, and the history that it replicates. The second alone
-- changes where a replica that lags takes over a process's place in the same process: data that came
-- from another master, or a master's after it had been a replica for a while.
local function server_run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') .. '/' ..
    string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end

-- Whether RQ's queue of this name holds jobs of another program.
local function is_ours(id)
  local data = redis.call('HGET', rq_job(id), 'data')
  return not data or string.find(data, 'workers.group.generate', 1, true)
end

local function is_foreign_queue(run)
  for _, id in ipairs(redis.call('LRANGE', rq_queue(run), 0, 9)) do
    if not is_ours(id) then return true end
  end
  return false
end

-- A full Redis refuses a script at its first write unless that write can only free memory.
local function begin_even_when_full()
  redis.call('DEL', RUNS .. ':none')
end

-- The drain that stands at a server, nil where none does. It runs out by itself.
local function drain_of(server)
  local value = redis.call('GET', drain_key(server))
  return value and cjson.decode(value) or nil
end

-- A process's slots, nil where the field is none: a slots hash holds other things that are no objects.
local function holder_of(key, epoch)
  local value = redis.call('HGET', key, epoch)
  return value and string.sub(value, 1, 1) == '{' and cjson.decode(value) or nil
end

-- How long what a slots hash holds may still be of the past: holders that Redis has forgotten declare
-- what they have within one TTL. A quiet server says enough only of a Redis that never knew it: after a
-- rewind a forgotten holder may be about to open what it has prefetched.
local function unsure_ms(key, now, ttl_ms, quiet)
  local run_id = server_run_id()
  local known = redis.call('HGET', key, 'run_id')
  if known ~= run_id then
    redis.call('HSET', key, 'run_id', run_id, 'since', string.format('%.0f', now), 'unsure',
      known and 'restarted' or 'new')
  end
  local unsure = redis.call('HGET', key, 'unsure')
  if not unsure then return 0 end
  local left = tonumber(redis.call('HGET', key, 'since')) + ttl_ms - now
  if left > 0 and not (quiet and unsure == 'new') then return left end
  redis.call('HDEL', key, 'unsure')
  return 0
end

-- What the result streams may hold before claims stop; `common.streams` says the same.
local function stream_mark_bytes(limit_bytes) return math.min(2147483648, limit_bytes / 4) end

-- The streams of all runs share one Redis, so their bytes are added up.
local function all_stream_bytes()
  local bytes = 0
  for _, run in ipairs(redis.call('ZRANGE', RUNS, 0, -1)) do
    bytes = bytes + tonumber(redis.call('HGET', counts_key(run), 'stream_bytes') or 0)
  end
  return bytes
end

-- Half of what the streams may hold before claims stop.
local function streams_half_full()
  local limit = tonumber(string.match(redis.call('INFO', 'memory'), '\nmaxmemory:(%d+)') or 0)
  return all_stream_bytes() > stream_mark_bytes(limit > 0 and limit or math.huge) / 2
end

local function count(run, counter, by)
  if by ~= 0 then redis.call('HINCRBY', counts_key(run), counter, by) end
end

-- How much of Redis' memory the ledgers and the queued requests use, as a share of what they may: they
-- must leave room for the result streams, and for half of that in flight. A Redis filled by its queue
-- alone could lease nothing any more, and nothing would ever leave it. 0 without a limit.
local function memory_share()
  local memory = redis.call('INFO', 'memory')
  local limit = tonumber(string.match(memory, '\nmaxmemory:(%d+)') or 0)
  if limit == 0 then return 0 end
  local streams = all_stream_bytes()
  local used = tonumber(string.match(memory, '\nused_memory:(%d+)'))
  return (used - streams) / (limit - 1.5 * stream_mark_bytes(limit))
end

-- New prompts bring their requests up to MOST_REQUESTS; beyond, their requests stay in inputs/, and the
-- ledger grows alone up to MOST_LEDGER. The rest is the feeder's: what has been accepted can always
-- be fed, in small portions at worst.
local MOST_REQUESTS, MOST_LEDGER, MOST_FED = 0.8, 0.9, 1

-- How many requests the run may still bring into Redis, its window, and how many wait for that.
-- Failed ones do not count, though Redis keeps them: a run must not end because many failed.
local DEFAULT_WINDOW = 1000000 -- as the help of `producer enqueue --window` says

local function window_room(run)
  local c = redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed', 'cancelled', 'unfed')
  for i = 1, 5 do c[i] = tonumber(c[i] or 0) end
  local held = c[1] - c[2] - c[3] - c[4] - c[5]
  local window = tonumber(redis.call('HGET', run_key(run), 'window') or DEFAULT_WINDOW)
  return math.max(window - held, 0), window, c[5]
end

-- Whether this process holds the lease. A job that somebody deleted under it names no holder, but
-- RQ's started registry still does.
local function holds(run, hex, epoch)
  local holder = redis.call('HGET', rq_job(hex), 'holder')
  if holder then return holder == epoch end
  return redis.call('ZSCORE', rq_started(run), hex .. ':' .. epoch) and true or false
end

-- Take a job out of all that says somebody works on it.
local function release(run, hex, job_goes)
  local holder = redis.call('HGET', rq_job(hex), 'holder')
  redis.call('ZREM', leases_key(run), hex)
  if holder then
    redis.call('ZREM', rq_started(run), hex .. ':' .. holder)
    if not job_goes then redis.call('HDEL', rq_job(hex), 'holder') end
  else
    -- The job was deleted under its lease. Our members have one score, so they lie by their text;
    -- ';' is what follows ':'.
    redis.call('ZREMRANGEBYLEX', rq_started(run), '[' .. hex .. ':', '(' .. hex .. ';')
  end
end

-- End a lease whose prompt has not ended. False when the job is nothing to list again: RQ's tools
-- cancelled it, or took its body; the audit sees to both.
local function release_unended(run, hex)
  release(run, hex)
  if redis.call('HEXISTS', rq_job(hex), 'request') == 0 then return false end
  if redis.call('HGET', rq_job(hex), 'status') == 'canceled' then return false end
  redis.call('HSET', rq_job(hex), 'status', 'queued')
  return true
end

-- Park a suspect. Those with most server deaths and lost leases come first, then the oldest: the
-- score is the instant, less this much for each of them.
local SUSPICION_MS = 10000000000000

local function park(run, hex, now)
  local job = redis.call('HMGET', rq_job(hex), 'deaths', 'lost')
  local weight = tonumber(job[1] or 0) + tonumber(job[2] or 0)
  redis.call('ZADD', parked_key(run), now - weight * SUSPICION_MS, hex)
end

local function lease(run, hex, epoch, deadline_ms)
  redis.call('ZADD', leases_key(run), deadline_ms, hex)
  redis.call('ZADD', rq_started(run), FAR_FUTURE_S, hex .. ':' .. epoch)
end

-- Say that somebody is at work in these 5 seconds, though nothing may have ended: that tells a stall
-- from a pause. Ten minutes of buckets are enough for every window; older ones go in one sweep.
local function note_alive(run, now)
  redis.call('HSETNX', rate_key(run), string.format('%.0f', math.floor(now / 5000)), 0)
  if redis.call('HLEN', rate_key(run)) <= 240 then return end
  local oldest = math.floor(now / 5000) - 120
  for _, bucket in ipairs(redis.call('HKEYS', rate_key(run))) do
    if tonumber(bucket) < oldest then redis.call('HDEL', rate_key(run), bucket) end
  end
end

-- Time in which something happened: gaps longer than a minute are another sitting.
local function note_activity(run, now)
  local last = tonumber(redis.call('HGET', run_key(run), 'last_active_ms') or now)
  count(run, 'active_ms', math.max(0, math.min(now - last, 60000)))
  redis.call('HSET', run_key(run), 'last_active_ms', string.format('%.0f', now))
  note_alive(run, now)
end

-- What half a minute brought: completions, their tokens, tokens that the servers generated, ms of
-- running requests, ms of ready worker groups. Six hours are kept (`common.marks.effect`).
local HISTORY_MS, HISTORY_KEPT = 30000, 720

local function note_history(run, now, ...)
  local key, bucket = history_key(run), math.floor(now / HISTORY_MS)
  local field = string.format('%.0f', bucket)
  local stored = redis.call('HGET', key, field)
  local sums, i = {...}, 0
  for part in string.gmatch(stored or '', '%d+') do
    i = i + 1
    sums[i] = (sums[i] or 0) + tonumber(part)
  end
  for n = 1, #sums do sums[n] = string.format('%.0f', sums[n]) end
  redis.call('HSET', key, field, table.concat(sums, ','))
  if stored or redis.call('HLEN', key) <= HISTORY_KEPT + 60 then return end
  for _, other in ipairs(redis.call('HKEYS', key)) do
    if tonumber(other) < bucket - HISTORY_KEPT then redis.call('HDEL', key, other) end
  end
end

-- Name a mark that sets itself. Those of one millisecond stand in the order in which they were made.
local function mark_id(run, at, what)
  local count = redis.call('HINCRBY', marks_key(run), 'n', 1) % 65536
  return string.format('%.0f-self-%04x', at, count) .. string.sub(redis.sha1hex(run .. what), 1, 8)
end

-- Keep a mark of this instant that stands for itself; `marks.lua` has those that others join.
local function add_mark(run, now, kind, detail)
  local id = mark_id(run, now, kind .. string.format('%.0f', now))
  redis.call('HSET', marks_key(run), 'm:' .. id,
    cjson.encode({id = id, kind = kind, at_ms = now, until_ms = now, detail = detail}))
end

local function job_data(hex)
  return '["workers.group.generate",null,["' .. hex .. '"],{}]'
end

local function write_job(run, hex, prompt, timeout_s, state)
  redis.call('HSET', rq_job(hex), 'data', job_data(hex), 'origin', run, 'status', state,
    'timeout', timeout_s, 'request', prompt)
end

local FAULTS_IN_A_ROW = 20

-- Faults with no success between them anywhere in the run: something is wrong with all of it. What
-- is leased now may still succeed, so that many more are allowed.
local function pause_for_faults(run, faults, reason)
  if faults < FAULTS_IN_A_ROW + redis.call('ZCARD', leases_key(run)) then return end
  if redis.call('HEXISTS', run_key(run), 'paused') == 1 then return end
  local why = string.format('%d faults in a row and no success, the last one: %s', faults, reason)
  redis.call('HSET', run_key(run), 'paused', why)
  add_mark(run, now_ms(), 'paused', why)
end

local function note_fault(run, reason)
  pause_for_faults(run, redis.call('HINCRBY', run_key(run), 'faults', 1), reason)
end

-- One death takes many jobs, which come back in several calls: it is one fault of the run. Deaths with
-- no success between them anywhere in the run are nothing that its prompts could be judged by.
local ONE_DEATH_MS = 5000

local function note_death(run, now, reason)
  local known = redis.call('HMGET', run_key(run), 'death_ms', 'faults')
  if now - tonumber(known[1] or 0) < ONE_DEATH_MS then
    -- The same one: fewer of its jobs are leased now.
    return pause_for_faults(run, tonumber(known[2] or 0), reason)
  end
  redis.call('HSET', run_key(run), 'death_ms', string.format('%.0f', now))
  note_fault(run, reason)
end

-- For the one process that reconciles or ends a run: nil while it may go on, else why it may not.
-- Its lease lasts on with each call. Redis may have restarted since the process began, and perhaps
-- has forgotten what it was told; then all of it is to be done again.
local function maintenance_refused(run, uid, run_id, token)
  if redis.call('HGET', run_key(run), 'uid') ~= uid then return 'unknown' end
  if server_run_id() ~= run_id then return 'restarted' end
  if redis.call('GET', maintenance_key(run)) ~= token then return 'lost' end
  redis.call('PEXPIRE', maintenance_key(run), TURN_MS)
  return nil
end
