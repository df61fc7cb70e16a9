-- wrk's requests: streamed chat completions with 200-word prompts, all different. Environment: MODEL, MAX_TOKENS
local vocabulary = { "import", "return", "class", "function", "value", "error", "string", "object", "module", "result", "index", "buffer" }
local head = '{"model":"' .. os.getenv("MODEL") .. '","stream":true,"max_tokens":' .. os.getenv("MAX_TOKENS") ..
  ',"ignore_eos":true,"messages":[{"role":"user","content":"'
local headers = { ["Content-Type"] = "application/json" }

math.randomseed(os.time())

request = function()
  local words = {}
  for i = 1, 200 do words[i] = vocabulary[math.random(#vocabulary)] end
  return wrk.format("POST", "/v1/chat/completions", headers, head .. table.concat(words, " ") .. '"}]}')
end
