-- Read what waits in a result stream of failures and cancellations, with their rows; writes nothing.
--
-- ARGV: run, uid, partition, id to begin at, entries to look at.
-- Returns {'unknown'}, or {'ok', last id that was looked at or '', rows...}.

local run = ARGV[1]
if redis.call('HGET', run_key(run), 'uid') ~= ARGV[2] then return {'unknown'} end
local found = redis.call('XRANGE', results_key(run, tonumber(ARGV[3])), ARGV[4], '+', 'COUNT',
  tonumber(ARGV[5]))
local reply = {'ok', found[1] and found[#found][1] or ''}
for _, entry in ipairs(found) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  if (fields.o == 'f' or fields.o == 'x') and fields.r then reply[#reply + 1] = fields.r end
end
return reply
