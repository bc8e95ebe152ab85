// Reasoning as the AI SDK reads it. Run by `run`, on a server that takes all output for reasoning, like
// openai_node.mjs.
import assert from 'node:assert/strict'
import { test } from 'node:test'

import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, streamText } from 'ai'

const [url, model, apiKey] = process.argv.slice(2)
const provider = createOpenAICompatible({ name: 'pellucid', baseURL: `${url}/v1`, apiKey, includeUsage: true })
const request = {
  model: provider(model), prompt: 'What is gravity?', maxOutputTokens: 12, temperature: 0, maxRetries: 0,
}

test('ai-sdk: reasoning is read from an answer and from a stream', async () => {
  const { text, reasoningText } = await generateText(request)
  assert.equal(text, '')
  assert.ok(reasoningText)
  let told = ''
  for await (const part of streamText(request).fullStream) if (part.type === 'reasoning-delta') told += part.text
  assert.equal(told, reasoningText)
})
