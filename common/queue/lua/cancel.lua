-- Cancel a run: mark it, see what is still to end as cancelled, close it. Works when Redis is full.
-- The prompts themselves end by `finish`, so that a completion that comes first wins.
--
-- ARGV: operation, run, uid, then the operation's own.
-- Returns {'unknown'} (no such run with this uid), or the operation's reply.

begin_even_when_full()
local operation, run, uid = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HMGET', run_key(run), 'uid', 'bits', 'cancelled', 'reconciled')
if known[1] ~= uid then return {'unknown'} end
local bits = tonumber(known[2])

-- From here on nothing is claimed or added, and renewals end. What is in RQ's list stands in the
-- ledger too, which is what `look` goes by.
local function mark()
  redis.call('HSET', run_key(run), 'cancelled', '1')
  redis.call('UNLINK', rq_queue(run))
  return {'ok'}
end

-- ARGV: first bucket, buckets, then keys (16 bytes) to look at besides.
-- Returns {'going_on'} (not marked), {'unreconciled'}, {'full'}, else {'ok', keys that are leased, keys
-- whose request is in inputs/ alone (of a slice: those that have lost it), jobs that are to end:
-- {run, uid, key, fingerprint, try, attempts, deaths, lost, prompt}}.
local function look()
  if not known[3] then return {'going_on'} end
  if known[4] ~= server_run_id() then return {'unreconciled'} end
  -- Other runs go on while this one ends.
  if streams_half_full() then return {'full'} end
  local now, held, bare, to_end = now_ms(), {}, {}, {}

  local function see(raw, hex, entry)
    local deadline_ms = tonumber(redis.call('ZSCORE', leases_key(run), hex) or 0)
    if deadline_ms >= now then
      held[#held + 1] = raw
      return
    end
    -- Whoever held it was told to stop when it renewed last, or is dead.
    if deadline_ms > 0 then release(run, hex) end
    local job = redis.call('HMGET', rq_job(hex), 'request', 'attempts', 'deaths', 'lost')
    if not job[1] then
      bare[#bare + 1] = raw
    else
      to_end[#to_end + 1] = {run, uid, raw, entry.fingerprint, entry.try, tonumber(job[2] or 0),
        tonumber(job[3] or 0), tonumber(job[4] or 0), job[1]}
    end
  end

  local first = tonumber(ARGV[4])
  for bucket = first, math.min(first + tonumber(ARGV[5]), 2 ^ bits) - 1 do
    local all = redis.call('HGETALL', ledger_stem(run) .. string.format('%x', bucket))
    for i = 1, #all, 2 do
      if string.sub(all[i + 1], 9, 9) == 'q' then
        local hex = hex_of(bucket, all[i], bits)
        see(to_raw(hex), hex, ledger_entry(all[i + 1]))
      end
    end
  end
  for i = 6, #ARGV do
    local hex = to_hex(ARGV[i])
    local entry = ledger_get(run, ARGV[i], hex, bits)
    if entry and is_queued(entry.state) then see(ARGV[i], hex, entry) end
  end
  return {'ok', held, bare, to_end}
end

-- Every prompt has ended. ARGV: how many objects of inputs/ that was made sure for.
-- Returns {'ok'}, or {'left'} where some have not.
local function close()
  local left = 0
  for i, number in ipairs(redis.call('HMGET', counts_key(run), 'total', 'completed', 'failed',
      'cancelled')) do
    left = left + (i == 1 and 1 or -1) * tonumber(number or 0)
  end
  if left > 0 then return {'left'} end
  -- What was given back meanwhile stands in the list, and names nothing any more.
  redis.call('UNLINK', rq_queue(run))
  redis.call('HSET', run_key(run), 'cancel_done', ARGV[4])
  return {'ok'}
end

local operations = {mark = mark, look = look, close = close}
return operations[operation]()
