-- Hold or lift the drain of one server: while it stands nobody opens a request there. Works when Redis
-- is full.
--
-- ARGV: server, what ('take' | 'renew' | 'lift'), token, owner, reason, limit (ms from now, after which
--   what is open is aborted; a renewal does not change it), TTL (ms), TTL of slots (ms), quiet ('1'
--   when the server itself says that nothing is open there).
-- Returns {'held', requests open, processes that have not heard of it yet, ms for which processes that
--   this Redis has forgotten may still be there} | {'refused', owner, reason} (another holds it) |
--   {'gone'} (it had run out, or Redis forgot it: whoever was empty may not be so any more) | {'lifted'}.

begin_even_when_full()
local server, what, token, owner, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local limit_ms, ttl_ms, slots_ttl_ms, quiet = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8]), ARGV[9] == '1'
local key, now = slots_key(server), now_ms()
local drain = drain_of(server)

if what == 'lift' then
  if not drain or drain.token ~= token then return {'gone'} end
  redis.call('DEL', drain_key(server))
  return {'lifted'}
end
if drain and drain.token ~= token then return {'refused', drain.owner, drain.reason} end
if not drain and what == 'renew' then return {'gone'} end
if not drain then
  drain = {token = token, owner = owner, reason = reason, deadline_ms = now + limit_ms}
end
redis.call('SET', drain_key(server), cjson.encode(drain), 'PX', ttl_ms)

local open, unheard = 0, 0
for _, epoch in ipairs(redis.call('HKEYS', key)) do
  local slot = holder_of(key, epoch)
  -- Whoever is past its time opens nothing, by its own clock too.
  if slot and slot.deadline_ms >= now then
    open = open + slot.slots
    if slot.drain ~= token then unheard = unheard + 1 end
  end
end
return {'held', open, unheard, math.ceil(unsure_ms(key, now, slots_ttl_ms, quiet))}
