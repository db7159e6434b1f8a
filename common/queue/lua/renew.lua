-- Renew a process's leases. Works when Redis is full.
--
-- ARGV: epoch, lease (ms), then pairs: run, key (16 bytes).
-- Returns one word a pair: ok | retaken (it had been reaped, nobody else leases it) |
--   stolen (another process leases it) | gone (it has ended, it or its run was cancelled, then the
--   lease ends here, or its run was forgotten) | unknown (no such run here, or not yet taught).

begin_even_when_full()
local epoch, lease_ms = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local reply = {}

-- Since when this process has renewed without a gap: what its right to reap others hangs on.
local function note_renewal()
  local kept = redis.call('GET', renewed_key(epoch))
  local since, last = string.match(kept or '', '^(%d+) (%d+)$')
  if not since or now - tonumber(last) > lease_ms / 2 then since = string.format('%.0f', now) end
  redis.call('SET', renewed_key(epoch), since .. ' ' .. string.format('%.0f', now),
    'PX', string.format('%.0f', 2 * lease_ms))
end

note_renewal()

local function renew(run, raw)
  local known = redis.call('HMGET', run_key(run), 'bits', 'cancelled')
  if not known[1] then
    return redis.call('EXISTS', tombstone_key(run)) == 1 and 'gone' or 'unknown'
  end
  local hex = to_hex(raw)
  local entry = ledger_get(run, raw, hex, tonumber(known[1]))
  if not entry then return 'unknown' end
  -- A rewound Redis may not know any more that it was fed: whoever works on it goes on.
  if entry.state == 'u' then return known[2] and 'gone' or 'unknown' end
  if entry.state ~= 'q' then return 'gone' end
  local leased = redis.call('ZSCORE', leases_key(run), hex)
  if leased and not holds(run, hex, epoch) then return 'stolen' end
  if known[2] or redis.call('HGET', rq_job(hex), 'status') == 'canceled' then
    if leased then release_unended(run, hex) end
    return 'gone'
  end
  lease(run, hex, epoch, now + lease_ms)
  if leased then return 'ok' end
  redis.call('HSET', rq_job(hex), 'holder', epoch, 'status', 'started')
  redis.call('ZREM', parked_key(run), hex)
  return 'retaken'
end

local alive = {}
for i = 3, #ARGV, 2 do
  local word = renew(ARGV[i], ARGV[i + 1])
  reply[#reply + 1] = word
  if word == 'ok' or word == 'retaken' then alive[ARGV[i]] = true end
end
for run in pairs(alive) do note_alive(run, now) end
return reply
